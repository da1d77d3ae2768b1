"""Who may come in: an ASGI layer before all routes. Closed by default.

- Host must be a name of this server, so that no web page reaches it through a name of its own (DNS rebinding).
- With keys, every route but /health and /version needs one; they are compared in constant time.
- No other origin is allowed to read answers, unless it is named.
- Bodies are bounded in size and in time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.server.generating import error_json, send_json
from minillm.server.metrics import Metrics

_OPEN = ("/health", "/version")
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AccessRules:
    """Attributes:
    keys: name by key; empty: all may come in.
    hosts: names and addresses that a Host header may have, without port; empty: any.
    origins: those of web pages that may read answers.
    max_body: bytes.
    body_seconds: a body must have come by then.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    hosts: Collection[str] = _LOCAL
    origins: Sequence[str] = ()
    max_body: int = 8 << 20
    body_seconds: float = 60.0

    def tenant_of(self, given: str) -> str | None:
        """The name of the key's owner; None for a key that is none of ours. Takes as long for any key."""
        found = None
        for key, name in self.keys.items():
            if hmac.compare_digest(_digest(key), _digest(given)):
                found = name
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class Access:
    """Lets requests in that keep to the rules; ``scope["state"]`` gets their ``tenant`` and their whole ``body``."""

    app: ASGIApp
    rules: AccessRules
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        counted = self._counted(scope, headers.get("origin", ""), send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, message = refusal
            more = [(b"www-authenticate", b"Bearer")] if status == 401 else []
            await send_json(counted, status, error_json(status, message), more)
            return
        if scope["method"] == "OPTIONS" and headers.get("origin") in self.rules.origins:
            await self._preflight(counted, headers.get("access-control-request-headers", ""))
            return
        state = scope.setdefault("state", {})
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        state["tenant"] = self.rules.tenant_of(given) or (scope.get("client") or ("",))[0]
        if scope["method"] in ("POST", "PUT", "PATCH"):
            read = await self._read(headers, receive)
            if isinstance(read, tuple):
                status, message = read
                await send_json(counted, status, error_json(status, message), [(b"connection", b"close")])
                return
            state["body"] = read
        await self.app(scope, receive, counted)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        rules, host = self.rules, headers.get("host", "")
        if rules.hosts and _hostname(host) not in rules.hosts:
            return 403, "this server does not go by that name: Host must be one of its own (see --allowed-host)"
        if scope["path"] in _OPEN or not rules.keys or scope["method"] == "OPTIONS":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or rules.tenant_of(given.strip()) is None:
            return 401, "this server wants an API key: Authorization: Bearer KEY"
        return None

    async def _read(self, headers: Mapping[str, str], receive: Receive) -> bytes | tuple[int, str]:
        """The body, or status and message of a refusal."""
        limit = self.rules.max_body
        too_large = (413, f"the body is larger than {limit} bytes")
        length = headers.get("content-length", "0")
        if length.isdecimal() and len(length) < 20 and int(length) > limit:
            return too_large
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page could send other kinds without asking first
            return 415, "content-type must be application/json"
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.rules.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return 400, "the client has gone"
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        return too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            return 408, f"the body has not come within {self.rules.body_seconds:g} s"

    def _counted(self, scope: Scope, origin: str, send: Send) -> Send:
        """``send``, which counts the response and names the origin that may read it."""
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
        """Allow an origin what it asks for: OpenAI's clients send a dozen headers of their own."""
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", (wanted or "authorization, content-type").encode("latin-1")),
            (b"access-control-max-age", b"600"),
            (b"content-length", b"0"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")
