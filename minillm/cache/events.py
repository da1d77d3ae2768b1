"""Cache changes as data: the chat app draws them, and tests replay them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["allocate", "hit", "fork", "copy", "cut", "free", "evict", "preempt", "swap_out", "swap_in"]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the block tables.

    ==========  ===================================================================================
    allocate    ``seq_id`` took ``blocks`` from the free ones
    fork        ``seq_id`` now shares ``blocks`` with ``parent_id``, in place of the blocks it had there
    copy        ``seq_id`` writes to ``blocks[1]``, a copy of the shared ``blocks[0]`` (copy-on-write)
    cut         ``seq_id`` freed its tail, ``blocks``: they held rejected draft tokens
    free        ``seq_id`` is gone; it held ``blocks``
    hit         the new ``seq_id`` found ``blocks`` in the prefix cache
    evict       the cached ``blocks`` are free; ``seq_id`` is -1
    preempt     ``seq_id``, which holds ``blocks``, is preempted and waits
    swap_out    ``seq_id`` left ``blocks`` for host memory
    swap_in     ``seq_id`` is back, in ``blocks``
    ==========  ===================================================================================
    """

    kind: EventKind
    seq_id: int
    blocks: tuple[int, ...]
    parent_id: int | None = None


Subscriber = Callable[[CacheEvent], None]
