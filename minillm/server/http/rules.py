"""The rules of access to a server, without the libraries that enforcing them needs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AccessRules:
    """The rules that requests must follow.

    Attributes:
        keys: maps each API key to its owner's name; if empty, every client is allowed.
        hosts: names and addresses allowed in the Host header, without port; if empty, all are allowed.
        origins: origins of web pages that may read responses, such as ``https://example.org``.
        max_body: maximum size of a body in bytes.
        body_seconds: maximum seconds for a body to arrive.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    hosts: Collection[str] = _LOCAL
    origins: Sequence[str] = ()
    max_body: int = 8 << 20
    body_seconds: float = 60.0

    def tenant_of(self, given: str) -> str | None:
        """Return the name of the owner of key ``given``; None for an unknown key.

        This takes equally long for every key.
        """
        found = None
        for key, name in self.keys.items():
            if hmac.compare_digest(_digest(key), _digest(given)):
                found = name
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
