"""State and helpers shared by the HTTP routes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minillm.checks import shown
from minillm.server import messages
from minillm.server.fair_queue import FairQueue
from minillm.server.metrics import Metrics
from minillm.server.questions import Questions
from minillm.server.replicas import Engine


class UnknownModel(HTTPException):
    """A request names a model that this server does not serve."""


@dataclass
class Service:
    """Shared state of the routes."""

    engine: Engine
    facts: messages.Ready
    names: tuple[str, ...]  # of the model
    queue: FairQueue
    metrics: Metrics
    has_keys: bool = False  # one key may not read another's text
    shared: bool = False  # several keys: none may take everything, or detect another's prompts in the cache
    send_seconds: float = 60.0
    prefixes: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    sessions: dict[str, Questions] = field(default_factory=dict)
    watchers: Counter[str] = field(default_factory=Counter)  # open streams of events, by tenant
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set when streams without an end must end

    def forget(self, replica: int) -> None:
        """Forget everything kept by an engine that has ended."""
        self.prefixes = {id: each for id, each in self.prefixes.items() if each.get("replica", 0) != replica}

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel for any other model: requests never load one."""
        if name is not None and name not in self.names:
            raise UnknownModel(404, f"the model {shown(name)} is not served here; use {self.names[0]}")

    def salt(self, tenant: str, salt: str | None = None, fork: messages.ForkPoint | None = None) -> str | None:
        """Return the salt of the prefix cache. Each key has its own, or a key could detect another's prompts.

        A fork without a salt uses its answer's salt.
        """
        if salt is None and (fork is not None or not self.shared):
            return None
        return f"{tenant}\n{salt or ''}"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
