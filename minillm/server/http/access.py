"""Access control: an ASGI layer in front of all routes. Access is closed by default.

- The Host header must be one of this server's names, so that no web page can reach the server by DNS rebinding.
- If there are API keys, every route but /health and /version needs one. Keys are compared in constant time. The tenant
  of a request is the owner of its key. Without keys, the tenant is the client's address.
- Web pages of other origins may not read responses unless their origin is listed.
- Bodies are limited in size and time. The total size of one tenant's large bodies in transit is limited as well.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.server.anthropic.answers import error_at, is_messages
from minillm.server.http.metrics import Metrics
from minillm.server.http.rules import AccessRules
from minillm.server.http.sending import HTTPError, send_json

OPEN_PATHS = ("/health", "/version")
_SINGLE = ("host", "authorization", "x-api-key", "content-type", "origin", "content-length", "transfer-encoding")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
_CLOSE = [(b"connection", b"close")]  # headers of the response to a request with a body that is not read
_MOST_OF_BODIES = 16 << 20  # maximum bytes of one tenant's large bodies in transit


class BodyMemory:
    """Limits the memory for request bodies that arrive in several pieces, to ``most`` bytes per tenant.

    While a tenant has no memory left, further bodies of this tenant wait.
    """

    def __init__(self, most: int = _MOST_OF_BODIES) -> None:
        self._most = most
        self._used: Counter[str] = Counter()  # bytes by tenant
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # by tenant, oldest first

    @asynccontextmanager
    async def take(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Wait until ``tenant`` may use ``size`` bytes. Free them when the context closes."""
        size = min(size, self._most)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((size, turn))
        self._admit(tenant)
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._used[tenant] -= size
            self._admit(tenant)

    def _admit(self, tenant: str) -> None:
        """Admit the oldest waiting bodies of ``tenant``, as long as they fit into the tenant's memory."""
        waiting = self._waiting.get(tenant, deque())
        while waiting and (waiting[0][1].done() or self._used[tenant] + waiting[0][0] <= self._most):
            size, turn = waiting.popleft()
            if not turn.done():
                self._used[tenant] += size
                turn.set_result(None)
        if not waiting:
            self._waiting.pop(tenant, None)
        if not self._used[tenant]:
            del self._used[tenant]


@dataclass(frozen=True)
class Access:
    """An ASGI application that passes on the requests that follow the rules. It rejects all other requests.

    ``scope["state"]`` gets the request's ``tenant`` and complete ``body``.
    """

    app: ASGIApp
    rules: AccessRules
    metrics: Metrics
    memory: BodyMemory = field(default_factory=BodyMemory)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        counted = self._counted(scope, headers.get("origin", ""), send)
        try:
            tenant = self._tenant(scope, headers)
            self._check(scope, headers, tenant)
            if scope["method"] == "OPTIONS" and headers.get("origin") in self.rules.origins:
                await self._preflight(counted, headers.get("access-control-request-headers", ""))
                return
            state = scope.setdefault("state", {})
            state["tenant"] = tenant or ""
            if scope["method"] in ("POST", "PUT", "PATCH"):
                body = await self._read(headers, receive, state["tenant"])
                state["body"] = body.removeprefix(codecs.BOM_UTF8)  # .NET's StreamWriter writes it
        except HTTPError as failed:
            await send_json(counted, failed.status, error_at(scope["path"], failed), failed.headers)
            return
        await self.app(scope, receive, counted)

    def _tenant(self, scope: Scope, headers: Mapping[str, str]) -> str | None:
        """Return the owner of the request's key; None if the key is missing or unknown.

        If the server has no keys, return the client's address.
        """
        if not self.rules.keys:
            return (scope.get("client") or ("",))[0]
        kind, _, given = headers.get("authorization", "").partition(" ")
        tenant = self.rules.tenant_of(given.strip()) if kind.lower() == "bearer" else None  # RFC 7235: any case
        if tenant is None and is_messages(scope["path"]):
            tenant = self.rules.tenant_of(headers.get("x-api-key", ""))  # Anthropic's header
        return tenant

    def _check(self, scope: Scope, headers: Mapping[str, str], tenant: str | None) -> None:
        """Raise HTTPError if the request does not follow the rules. Its body is not checked."""
        rules = self.rules
        names = [name for name, _ in scope["headers"]]
        for name in _SINGLE:
            if names.count(name.encode()) > 1:
                raise HTTPError(400, f"more than one {name} header; send one")
        if rules.hosts and _hostname(headers.get("host", "")) not in rules.hosts:
            raise HTTPError(403, "unknown Host header: use one of this server's names, or allow more by --allowed-host")
        if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
            raise HTTPError(501, "transfer-encoding must be chunked; send the body without other encodings")
        if tenant is None and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            why = "this server requires an API key: send Authorization: Bearer KEY"
            raise HTTPError(401, why, [(b"www-authenticate", b"Bearer")])

    async def _read(self, headers: Mapping[str, str], receive: Receive, tenant: str) -> bytes:
        """Return the request's body. Raises HTTPError if the body is rejected."""
        limit, length = self.rules.max_body, headers.get("content-length", "")
        size = int(length) if length.isdecimal() and len(length) < 20 else limit
        if size > limit:
            raise HTTPError(413, f"the body is larger than {limit} bytes", _CLOSE)
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page could send other types without a preflight request
            raise HTTPError(415, "content-type must be application/json", _CLOSE)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPError(415, "content-encoding must be identity; send the body without compression", _CLOSE)
        try:
            async with asyncio.timeout(self.rules.body_seconds):
                first = await receive()
                if first["type"] == "http.request" and not first.get("more_body", False):
                    return self._joined([first.get("body", b"")])
                async with self.memory.take(tenant, size):
                    return await self._read_rest(first, receive)
        except TimeoutError:
            why = f"the body did not arrive within {self.rules.body_seconds:g} s"
            raise HTTPError(408, why, _CLOSE) from None

    async def _read_rest(self, message: Message, receive: Receive) -> bytes:
        parts, size = [], 0
        while message["type"] != "http.disconnect":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.rules.max_body or not message.get("more_body", False):
                return self._joined(parts)
            message = await receive()
        raise HTTPError(400, "the client has disconnected", _CLOSE)

    def _joined(self, parts: Sequence[bytes]) -> bytes:
        body = b"".join(parts)
        if len(body) > self.rules.max_body:
            raise HTTPError(413, f"the body is larger than {self.rules.max_body} bytes", _CLOSE)
        return body

    def _counted(self, scope: Scope, origin: str, send: Send) -> Send:
        """Wrap ``send`` to count the response, and to add the CORS headers if ``origin`` may read the response."""
        allowed = [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"retry-after, server-timing"),
            (b"vary", b"Origin"),
        ]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route: Any = scope.get("route")
                self.metrics.requests.labels(getattr(route, "path", "other"), str(message["status"])).inc()
                if origin and origin in self.rules.origins:
                    message = {**message, "headers": [*message.get("headers", []), *allowed]}
            await send(message)

        return counted

    async def _preflight(self, send: Send, wanted: str) -> None:
        """Answer a CORS preflight request. Allow all headers that the origin asks for in ``wanted``.

        OpenAI's clients send a dozen headers of their own.
        """
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", (wanted or "authorization, content-type").encode("latin-1")),
            (b"access-control-max-age", b"600"),
            (b"content-length", b"0"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _hostname(host: str) -> str:
    """Return the name in a Host header, without its port; an empty text if the header is invalid."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().rstrip(".") if found else ""
