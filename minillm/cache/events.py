"""Changes of the cache, as data: the chat app draws them, tests replay them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["allocate", "hit", "fork", "copy", "cut", "free", "evict", "preempt", "swap_out", "swap_in"]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the block tables.

    ==========  ===================================================================================
    allocate    ``seq_id`` took ``blocks`` from the free ones
    fork        ``seq_id`` now shares ``blocks`` with ``parent_id``; blocks that it had in their place it has no more
    copy        ``seq_id`` writes to ``blocks[1]``, a copy of the shared ``blocks[0]`` (copy-on-write)
    cut         ``seq_id`` freed its tail, ``blocks``: the tokens in them were guesses, and wrong
    free        ``seq_id`` is gone; it held ``blocks``
    hit         the new ``seq_id`` found ``blocks`` in the prefix cache
    evict       the cached ``blocks`` are free; ``seq_id`` is -1
    preempt     ``seq_id``, which holds ``blocks``, has to make room and waits
    swap_out    ``seq_id`` left ``blocks`` for the host's memory
    swap_in     ``seq_id`` is back, in ``blocks``
    ==========  ===================================================================================
    """

    kind: EventKind
    seq_id: int
    blocks: tuple[int, ...]
    parent_id: int | None = None


Subscriber = Callable[[CacheEvent], None]
