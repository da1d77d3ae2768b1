"""Pin the beginnings of conversations with attached files, so that their blocks are not evicted."""

from dataclasses import dataclass, field

from minillm.cache import BlockManager
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.errors import CapacityError
from minillm.sequence import Sequence

_MOST = 4  # one conversation pins at most a fourth of the pool


@dataclass
class FilePins:
    """Pins the beginnings of conversations. A beginning is a conversation's prompt up to its last attached file."""

    driver: Driver
    cache: BlockManager
    pinned: dict[str, Sequence] = field(default_factory=dict)  # by conversation

    def begin(self, conversation: str, token_ids: list[int]) -> None:
        """Unpin a conversation's beginning if the next prompt, ``token_ids``, does not start with this beginning."""
        pinned = self.pinned.get(conversation)
        if pinned is not None and token_ids[: len(pinned.token_ids)] != pinned.token_ids:
            self.release(conversation)

    def keep(self, conversation: str, sequence: Sequence, num_tokens: int) -> None:
        """Pin the full blocks of the first ``num_tokens`` tokens of ``sequence``, as the conversation's beginning.

        ``sequence`` must be idle. The new beginning replaces the conversation's earlier beginning. Do nothing if the
        new beginning has no more blocks than the earlier beginning, or needs more than a fourth of the pool.
        """
        cache, before = self.cache, self.pinned.get(conversation)
        num_blocks = min(num_tokens, sequence.num_computed) // cache.block_size
        had = 0 if before is None else len(before.blocks)
        if sequence.table is None or num_blocks <= had or _MOST * num_blocks > cache.num_blocks:
            return
        pinned = idle_sequences.fork_idle(self.driver, sequence, num_blocks * cache.block_size)
        self.release(conversation)
        try:
            idle_sequences.pin(self.driver, pinned)
        except CapacityError:  # others need the memory more
            return
        self.pinned[conversation] = pinned

    def release(self, conversation: str) -> None:
        """Unpin the blocks of a conversation's beginning, if they are pinned: see `FilePins`."""
        if (pinned := self.pinned.pop(conversation, None)) is not None:
            idle_sequences.unpin(self.driver, pinned)

    def close(self) -> None:
        for conversation in list(self.pinned):
            self.release(conversation)
