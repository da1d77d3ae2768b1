"""Prefixes that clients compute and pin. This module runs in the engine thread."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.checks import shown
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.errors import MinillmError
from minillm.sequence import Sequence, SequenceGroup
from minillm.service import call_messages as messages


@dataclass(slots=True)
class Pinned:
    """A prefix that is pinned or being computed."""

    tenant: str
    call_id: str
    group: SequenceGroup
    sequence: Sequence | None = None  # None while the prefix is computed


@dataclass
class Prefixes:
    """Computes and pins prefixes, each under a new name. Results of calls are sent to the HTTP process."""

    driver: Driver
    send: Callable[[messages.AnyEvent], None]
    pinned: dict[str, Pinned] = field(default_factory=dict)

    def pin(self, call: messages.PinPrefix, token_ids: list[int]) -> None:
        """Start to compute the prefix ``token_ids``. `take` later pins the prefix's blocks and answers ``call``."""
        name = f"prefix-{secrets.token_hex(8)}"
        try:
            group = self.driver.engine.add(idle_sequences.prefix_request(token_ids, call.salt, name))
        except MinillmError as error:
            self.send(messages.Result(call.call_id, None, str(error), messages.kind_of(error)))
        else:
            self.pinned[name] = Pinned(call.tenant, call.call_id, group)

    def take(self, name: str, group: SequenceGroup) -> bool:
        """Pin the prefix that a finished request has computed, and send the result of the call.

        ``name`` is the request's id. Return False if the request is not for a prefix.
        """
        pin, sequence = self.pinned.get(name), group.sequences[0]
        if pin is None:
            return False
        try:
            if group.error is not None:
                raise MinillmError(group.error.text)
            idle_sequences.pin(self.driver, sequence)
        except MinillmError as error:
            del self.pinned[name]
            self.send(messages.Result(pin.call_id, None, str(error)))
            return True
        pin.sequence = sequence
        count = len(sequence.token_ids) - 1
        self.send(messages.Result(pin.call_id, {"id": name, "num_tokens": count, "num_blocks": len(sequence.blocks)}))
        return True

    def unpin(self, call: messages.UnpinPrefix) -> None:
        """Unpin a prefix, and send the result of the call."""
        pin = self.pinned.get(call.prefix_id)
        if pin is None or pin.sequence is None:
            self.send(messages.Result(call.call_id, None, f"there is no prefix {shown(call.prefix_id)}"))
            return
        del self.pinned[call.prefix_id]
        idle_sequences.unpin(self.driver, pin.sequence)
        self.send(messages.Result(call.call_id, {"id": call.prefix_id, "deleted": True}))
