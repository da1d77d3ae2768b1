"""Cache changes as data: the chat app draws them, and tests replay them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["allocate", "hit", "fork", "copy", "cut", "free", "evict", "preempt", "swap_out", "swap_in", "load"]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change to the block tables. ``kind`` says what ``seq_id``, ``blocks`` and ``parent_id`` mean:

    ==========  ===================================================================================
    allocate    ``seq_id`` took the free ``blocks``
    fork        ``seq_id`` now begins with ``blocks``, which it shares with ``parent_id``
    copy        ``seq_id`` writes to ``blocks[1]``, a copy of the shared ``blocks[0]`` (copy-on-write)
    cut         ``seq_id`` freed its last ``blocks``, which held rejected draft tokens
    free        ``seq_id`` is gone; it held ``blocks``
    hit         the new ``seq_id`` found ``blocks`` in the prefix cache
    evict       the cached ``blocks`` became free; ``seq_id`` is -1
    preempt     ``seq_id``, which still holds ``blocks``, is preempted
    swap_out    ``seq_id`` moved from ``blocks`` to host memory
    swap_in     ``seq_id`` moved from host memory to ``blocks``
    load        ``blocks`` of ``seq_id`` were read from disk
    ==========  ===================================================================================
    """

    kind: EventKind
    seq_id: int
    blocks: tuple[int, ...]
    parent_id: int | None = None


Subscriber = Callable[[CacheEvent], None]
