"""Which processes are still there, where they are spread over several nodes.

torchrun ends what it has started on its own node when one of that dies. Of another node's end it learns nothing, and
whoever waits for a process there would wait for ever. So each adds to a count of its own, in the store that all see,
and whoever waits looks whether the others' counts still grow.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minillm.parallel.channel import RankDied, end_process

if TYPE_CHECKING:
    from torch.distributed import Store

EVERY = 2.0  # seconds from one beat to the next
SILENCE = 60.0  # seconds without one after which a process is taken for dead: loading may hold up a thread for some


def beat(store: Store, rank: int, every: float = EVERY, silence: float = SILENCE) -> None:
    """Say that this process is there, from now on until it ends.

    If the store does not answer for ``silence`` seconds, this is the node that is cut off, and the process ends: it may
    be waiting for the store itself.

    Args:
        store: a connection of its own, on which nobody waits for something.
    """
    answered, gone = threading.Event(), threading.Event()

    def go_on() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, which those who need it will see
            while True:
                store.add(_key(rank), 1)
                answered.set()
                time.sleep(every)
        gone.set()
        answered.set()

    def watch() -> None:
        while answered.wait(silence):
            if gone.is_set():
                return
            answered.clear()
        end_process(f"the first node has not answered for {silence:.0f} s: it or the network is gone")

    for each in (go_on, watch):
        threading.Thread(target=each, name="beats", daemon=True).start()


class Listener:
    """Tells whoever waits for other ranks when one of them is gone. They have begun to `beat`, or will soon."""

    def __init__(self, store: Store, every: float = EVERY, silence: float = SILENCE) -> None:
        self._store, self._every, self._silence = store, every, silence
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: how many beats, and when that last changed
        self._looked_at = time.monotonic()

    def check(self, ranks: Iterable[int]) -> None:
        """Look whether ``ranks`` are there. Cheap: looks no more often than they beat.

        Raises:
            RankDied: one of them has not been heard of for too long.
        """
        now = time.monotonic()
        if now - self._looked_at < self._every:
            return
        self._looked_at = now
        for rank in ranks:
            beats, since = self._store.add(_key(rank), 0), now
            if rank in self._heard and self._heard[rank][0] == beats:
                since = self._heard[rank][1]
            self._heard[rank] = beats, since
            if now - since >= self._silence:
                raise RankDied(
                    f"rank {rank} has not been heard of for {now - since:.0f} s: it, its node or the network is gone"
                )


def _key(rank: int) -> str:
    return f"beats/{rank}"
