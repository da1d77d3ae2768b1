"""Starts the engine's process and serves it over HTTP until a signal comes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from minillm.errors import MinillmError, UsageError
from minillm.server.access import AccessRules
from minillm.server.app import Service, make_app
from minillm.server.engine_process import EngineProcess
from minillm.server.http_protocol import BoundedProtocol
from minillm.server.metrics import Metrics
from minillm.server.replicas import Engine, Replicas
from minillm.server.seats import Seats
from minillm.service import messages as chat


@dataclass(frozen=True)
class ServerConfig:
    """Attributes:
    names: of the model, for clients; by default the model's own name.
    max_waiting: requests that wait before the engine; more are told to come again.
    grace_seconds: that running answers have to end when the server is stopped.
    replicas: engines of the model, each with its own GPU.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    rules: AccessRules = field(default_factory=AccessRules)
    names: tuple[str, ...] = ()
    max_waiting: int = 1024
    grace_seconds: int = 30
    replicas: int = 1


def open_socket(host: str, port: int) -> socket.socket:
    """A socket at this address, on which nothing listens yet; raises UsageError where that is not to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        return found
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot serve at {host}, port {port}: {why}; choose another --port") from None


async def serve(
    config: ServerConfig,
    model: str,
    options: dict[str, Any],
    told: Callable[[chat.Event], object],
    opened: Callable[[str, Service], object],
) -> None:
    """Load the model and serve it until SIGINT or SIGTERM; running answers may end then.

    Args:
        options: of EngineConfig.
        told: is told how loading goes on.
        opened: is told the server's address when it answers.

    Raises:
        MinillmError: the model cannot be loaded, or the engine has ended.
    """
    listening = open_socket(config.host, config.port)
    engine: EngineProcess | Replicas
    if config.replicas > 1:
        engine = await Replicas.start(model, options, told, config.replicas)
    else:
        engine = await EngineProcess.start(model, options, told)
    try:
        facts = await (engine.loaded() if isinstance(engine, Replicas) else engine.ready)
        seats = Seats(facts.max_num_seqs, config.max_waiting)
        engines = engine.engines if isinstance(engine, Replicas) else [engine]
        metrics = Metrics(seats, lambda: [each.figures for each in engines])
        names = config.names or _names(facts.facts.model)
        service = Service(engine, facts, names, seats, metrics, bool(config.rules.keys))
        server = _Server(service, uvicorn.Config(
            make_app(service, config.rules),
            http=BoundedProtocol, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False,
            timeout_keep_alive=30, timeout_graceful_shutdown=config.grace_seconds,
            limit_concurrency=2 * (config.max_waiting + facts.max_num_seqs) + 100,
        ))  # fmt: skip
        server.opened = lambda: opened(_address(listening), service)
        watching = asyncio.create_task(_end_with_engine(engine, server))
        await server.serve(sockets=[listening])
        watching.cancel()
        if engine.ended.is_set():
            raise engine.failure or MinillmError("the engine has ended")
    finally:
        await engine.stop()
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn's server, whose streams that never end by themselves end with it."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.service = service
        self.opened: Callable[[], object] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.opened()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.closing.set()
        await super().shutdown(sockets)


async def _end_with_engine(engine: Engine, server: uvicorn.Server) -> None:
    await engine.ended.wait()
    server.should_exit = True


def _names(model: str) -> tuple[str, ...]:
    """A model's names for clients: of a file or directory the last part, then the whole."""
    short = Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
    return tuple(dict.fromkeys((short, model)))


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
