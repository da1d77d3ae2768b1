"""State and functions that all HTTP routes share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from minillm.checks import shown
from minillm.server.http.fair_queue import FairQueue
from minillm.server.http.metrics import Metrics
from minillm.server.http.sending import HTTPError
from minillm.server.replicas import Replicas
from minillm.server.responses.answers import ResponseWriter
from minillm.server.responses.store import ResponseStore
from minillm.server.sessions.questions import Questions
from minillm.service.call_messages import ForkPoint
from minillm.service.messages import Loaded


@dataclass
class Service:
    """The state that all routes share."""

    engine: Replicas
    facts: Loaded
    names: tuple[str, ...]  # the model's names for clients
    queue: FairQueue
    metrics: Metrics
    has_keys: bool = False  # the server requires API keys, so a key's owner must not read the text of other owners
    shared: bool = False  # several owners of keys: none may take all slots, or detect others' prompts in the cache
    send_seconds: float = 60.0
    prefixes: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    sessions: dict[str, Questions] = field(default_factory=dict)
    watchers: Counter[str] = field(default_factory=Counter)  # open streams of events, by tenant
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: dict[tuple[str, str], ResponseWriter] = field(default_factory=dict)  # running responses, by tenant and id
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set at shutdown, to end endless streams

    def forget(self, replica: int) -> None:
        """Drop the pinned prefixes of an engine that has ended. ``replica`` is the engine's index."""
        self.prefixes = {id: each for id, each in self.prefixes.items() if each.get("replica", 0) != replica}

    def check_model(self, name: str | None) -> None:
        """Raise HTTPError if ``name`` is not a name of the served model. Requests never load another model."""
        if name is not None and name not in self.names:
            why = f"the model {shown(name)} is not served here; use {self.names[0]}"
            raise HTTPError(404, why, code="model_not_found")

    def salt(self, tenant: str, salt: str | None = None, fork: ForkPoint | None = None) -> str | None:
        """Return the salt for a request's blocks in the prefix cache. Only requests with equal salts share blocks.

        If the API keys have several owners, the salt contains the owner. Otherwise an owner could detect, by timing,
        which prompts of others are cached. The result is None if there is no salt. For a fork, None means that the fork
        keeps the salt of the answer that it continues.
        """
        if salt is None and (fork is not None or not self.shared):
            return None
        return f"{tenant}\n{salt or ''}"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
