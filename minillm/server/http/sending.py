"""Errors and JSON responses of the HTTP server, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Send

CONTEXT_LENGTH = "context_length_exceeded"  # OpenAI's code for a prompt that is too long
_TOO_LONG = "this model's maximum context length is exceeded"  # LiteLLM and others look for these words
_TYPE_JSON = (b"content-type", b"application/json")


class HTTPError(Exception):
    """Raised to end a request with an error response.

    ``field`` is the name of the request's invalid field, ``code`` is OpenAI's error code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        field: str = "",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.field, self.code = status, headers, field, code

    def json(self) -> dict[str, Any]:
        """Return the error in OpenAI's format. Without a code, it has the usual code for its status."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = self.code or {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(self.status)
        message = f"{_TOO_LONG}: {self}" if code == CONTEXT_LENGTH else str(self)
        return {"error": {"message": message, "type": kind, "param": self.field or None, "code": code}}


async def send_json(send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send a complete response with ``value`` as JSON."""
    body = msgspec.json.encode(value)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_TYPE_JSON, length, *headers]})
    await send(body_message(body, more=False))


def body_message(data: bytes, *, more: bool) -> dict[str, Any]:
    """Return the ASGI message for a part of a response's body."""
    return {"type": "http.response.body", "body": data, "more_body": more}
