"""Start the engine processes, and serve them over HTTP until a signal arrives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from minillm.errors import UsageError
from minillm.server.app import make_app
from minillm.server.client import LoadingEvent
from minillm.server.http.fair_queue import FairQueue
from minillm.server.http.metrics import Metrics
from minillm.server.http.protocol import BoundedProtocol
from minillm.server.http.rules import AccessRules
from minillm.server.replicas import Replicas
from minillm.server.service import Service
from minillm.service.messages import Load
from minillm.service.process import EngineProcess

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OTHER_DESCRIPTORS = 100  # number of file descriptors in addition to connections
_SAY_SECONDS = 60.0
_ERROR_SECONDS = 5  # time to send the error to answers that have not ended within the grace period


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server.

    Attributes:
        names: names by which clients may call the model; default: the model's own name.
        max_waiting: number of requests that may wait for the engine. Further requests are rejected with status 429.
        grace_seconds: when the server stops, running answers have this many seconds to end.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    rules: AccessRules = field(default_factory=AccessRules)
    names: tuple[str, ...] = ()
    max_waiting: int = 1024
    grace_seconds: int = 30


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this address but does not listen yet.

    Raises UsageError if the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        return found
    except UnicodeError:  # a part of the name is empty or too long
        raise UsageError(f"cannot serve at {host}: this is no host name; choose another --host") from None
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot serve at {host}, port {port}: {why}; choose another --port") from None


def allow_descriptors(count: int) -> None:
    """Increase this process's limit of open file descriptors to ``count``, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class FewDescriptors:
    """An exception handler for the event loop, which reports a lack of file descriptors in one line.

    It does so at most once a minute. asyncio would report the lack thousands of times a second, with tracebacks.
    """

    _next = 0.0  # time at which the lack may be reported again

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next:
            self._next = loop.time() + _SAY_SECONDS
            sys.stderr.write(f"minillm: connections wait: {error.strerror}; allow more with 'ulimit -n'\n")


async def serve(
    config: ServerConfig,
    processes: Sequence[EngineProcess],
    load: Load,
    on_loading: Callable[[LoadingEvent], object],
    opened: Callable[[str, Service], object],
) -> None:
    """Load the model and serve it until SIGINT or SIGTERM arrives. Then give running answers time to end.

    Args:
        processes: processes of engines, which `start_engine` returned.
        on_loading: called with the progress of loading.
        opened: called with the server's address once it accepts requests.

    Raises:
        MinillmError: the model cannot be loaded, or the engine has ended.
    """
    listening = open_socket(config.host, config.port)
    asyncio.get_running_loop().set_exception_handler(FewDescriptors())
    engine = await Replicas.start(processes, load, on_loading)
    try:
        facts = await engine.loaded()
        shared = len(set(config.rules.keys.values())) > 1
        queue = FairQueue(facts.max_num_seqs, config.max_waiting, shared=shared)
        metrics = Metrics(queue, engine.figures)
        names = config.names or _names(facts.model)
        most = 2 * (config.max_waiting + facts.max_num_seqs) + 100  # connections
        allow_descriptors(most + _OTHER_DESCRIPTORS)
        service = Service(engine, facts, names, queue, metrics, bool(config.rules.keys), shared)
        engine.lost = service.forget
        server = _Server(service, uvicorn.Config(
            make_app(service, config.rules),
            http=BoundedProtocol, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False,
            timeout_keep_alive=30, timeout_graceful_shutdown=config.grace_seconds + _ERROR_SECONDS,
            limit_concurrency=most,
        ))  # fmt: skip
        server.opened = lambda: opened(_address(listening), service)
        server.late = lambda: engine.refuse_all("the server is stopping")
        server.grace_seconds = config.grace_seconds
        watching = asyncio.create_task(_end_with_engine(engine, server))
        await server.serve(sockets=[listening])
        watching.cancel()
        if engine.ended.is_set():
            raise engine.failure
    finally:
        await engine.stop()
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn's server with a grace period for shutdowns.

    A shutdown ends endless streams at once. Answers that are still running end after ``grace_seconds``.
    """

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.service = service
        self.opened: Callable[[], object] = lambda: None
        self.late: Callable[[], object] = lambda: None  # called when the grace period is over
        self.grace_seconds = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.opened()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.closing.set()
        late = asyncio.get_running_loop().call_later(self.grace_seconds, self.late)
        await super().shutdown(sockets)
        late.cancel()


async def _end_with_engine(engine: Replicas, server: uvicorn.Server) -> None:
    await engine.ended.wait()
    server.should_exit = True


def _names(model: str) -> tuple[str, ...]:
    """Return the names by which clients may call a model.

    For a file or directory, these are the last part of its path and the whole path.
    """
    short = Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
    return tuple(dict.fromkeys((short, model)))


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
