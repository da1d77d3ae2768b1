"""Stored responses. Each belongs to a tenant. All are lost when the server ends."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minillm.server.responses.answers import response_of

MOST_RESPONSES = 1_000  # maximum number of responses of a tenant
MOST_BYTES = 64 << 20  # maximum size of the responses of a tenant
MOST_TOTAL_BYTES = 512 << 20  # maximum size of all responses
MOST_SECONDS = 3_600.0  # a response is dropped this long after its last use


@dataclass
class Stored:
    """A stored response, with the data that a request needs to continue its conversation.

    Attributes:
        response: the response as JSON.
        items: the response's output items by id, each as JSON.
        messages: all messages of the conversation, up to and including the answer, as JSON. Instructions are not
            included.
        key: everything else that the prompt depends on, as JSON: instructions, tools and template variables.
        token_ids: the token ids of prompt and answer; empty if a stop string shortened the answer's text.
    """

    response: bytes
    items: dict[str, bytes]
    messages: bytes
    key: bytes
    token_ids: array[int]
    used: float = 0.0  # time of the last use

    @classmethod
    def of(cls, response: Any, messages: Sequence[Any], key: bytes, token_ids: Sequence[int]) -> Stored:
        """Encode a finished response and its conversation."""
        encode = msgspec.json.encode
        items = {item["id"]: encode(item) for item in response["output"]}
        return cls(encode(response), items, encode(messages), key, array("I", token_ids))

    @property
    def size(self) -> int:
        """Return the size of the entry in bytes."""
        parts = (self.response, *self.items.values(), self.messages, self.key)
        return sum(map(len, parts)) + self.token_ids.itemsize * len(self.token_ids)


@dataclass
class ResponseStore:
    """Stores responses by tenant and id. Drops the least recently used responses if there are too many."""

    clock: Callable[[], float] = time.monotonic
    _own: dict[str, OrderedDict[str, Stored]] = field(default_factory=dict)  # by tenant, least recently used first
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes by tenant

    def put(self, tenant: str, name: str, stored: Stored) -> None:
        """Store a response. If this exceeds a limit, drop the least recently used responses."""
        self._drop_old()
        stored.used = self.clock()
        own = self._own.setdefault(tenant, OrderedDict())
        own[name] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        while tenant in self._own and (len(own) > MOST_RESPONSES or self._sizes[tenant] > MOST_BYTES):
            self.delete(tenant, next(iter(own)))
        while sum(self._sizes.values()) > MOST_TOTAL_BYTES:  # drop responses of the tenant with the most bytes
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.delete(largest, next(iter(self._own[largest])))

    def get(self, tenant: str, name: str) -> Stored | None:
        """Return a tenant's response; None for an unknown id."""
        self._drop_old()
        own = self._own.get(tenant, OrderedDict())
        if (found := own.get(name)) is not None:
            found.used = self.clock()
            own.move_to_end(name)
        return found

    def item(self, tenant: str, name: str) -> bytes | None:
        """Return an output item of a tenant's responses, as JSON; None for an unknown id."""
        found = self.get(tenant, response_of(name))
        return None if found is None else found.items.get(name)

    def delete(self, tenant: str, name: str) -> bool:
        """Delete a tenant's response. Return whether it was stored."""
        found = self._own.get(tenant, OrderedDict()).pop(name, None)
        if found is None:
            return False
        self._sizes[tenant] -= found.size
        if not self._own[tenant]:
            del self._own[tenant], self._sizes[tenant]
        return True

    def _drop_old(self) -> None:
        """Drop the responses that nobody has used for `MOST_SECONDS`."""
        oldest = self.clock() - MOST_SECONDS
        for tenant, own in list(self._own.items()):
            while own and next(iter(own.values())).used < oldest:
                self.delete(tenant, next(iter(own)))
