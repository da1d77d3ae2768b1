"""Read blocks into the pool, in threads, and decide whether that is faster than computing their tokens."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from minillm.outputs import StepReport
from minillm.runner.pool_blocks import Buffers, Incoming, PoolBlocks

Key = TypeVar("Key")

_PIECE, _PIECES = 8, 16  # blocks of one piece; pieces under way at a time in one read
_READERS = 4  # threads: a cold disk is faster with several reads at a time
_OVERHEAD = 0.002  # seconds of a read, in addition to its bytes
_TIMED_TOKENS = 32  # a step with fewer prompt tokens says little about the rate
_PREFILL, _READ = "prefill_tokens_per_second", "read_bytes_per_second"


@dataclass(eq=False)
class BlockRead(Generic[Key]):
    """A read of the blocks with ``keys`` into ``blocks`` of the pool."""

    keys: Sequence[Key]
    blocks: list[int]
    num_begun: int = 0  # number of first blocks with a read that has begun
    num_read: int = 0  # number of first blocks that are whole and in the pool
    failed: bool = False  # the block after them was missing or damaged
    pieces: deque[tuple[Incoming, Future[int]]] = field(default_factory=deque)  # under way, in order
    began: float = 0.0
    ended: float = 0.0  # when the last piece was read

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


class BlockReader(Generic[Key]):
    """Reads blocks from outside of the pool, such as from disk, into ``pool``.

    Args:
        read: reads the block with the given key into buffers. Returns whether the block exists and is undamaged.
        rates: the attribute `rates` of an earlier process.

    Attributes:
        rates: measured rates of computing prompts (tokens per second) and of reading (bytes per second); 0: unknown.
    """

    def __init__(self, pool: PoolBlocks, read: Callable[[Key, Buffers], bool], rates: Mapping[str, object]) -> None:
        known = {name: rates.get(name) for name in (_PREFILL, _READ)}
        self.rates = {name: float(rate) if isinstance(rate, int | float) else 0.0 for name, rate in known.items()}
        self._pool, self._read = pool, read
        self._threads = ThreadPoolExecutor(_READERS, "minillm disk")
        self._prepared: list[BlockRead[Key]] = []

    def is_worthwhile(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether reading blocks is expected to be faster than computing their tokens."""
        prefill, read = self.rates[_PREFILL], self.rates[_READ]
        return not (prefill and read) or num_tokens / prefill >= _OVERHEAD + num_blocks * self._pool.num_bytes / read

    def measure(self, step: StepReport) -> None:
        """Update the rate at which prompts are computed, from a step with prompt tokens only."""
        if step.num_prefill_tokens >= _TIMED_TOKENS and not step.num_decodes and step.seconds:
            # The best of the recent steps: others may have waited for a compiler or for other programs.
            self.rates[_PREFILL] = max(step.num_prefill_tokens / step.seconds, 0.9 * self.rates[_PREFILL])

    def prepare(self, keys: Sequence[Key], blocks: list[int]) -> BlockRead[Key]:
        """Prepare to read into ``blocks``, which no step uses. `start` begins the read, after the present step."""
        read = BlockRead(keys, blocks)
        self._prepared.append(read)
        return read

    def start(self) -> None:
        """Begin the prepared reads."""
        prepared, self._prepared = self._prepared, []
        for read in prepared:
            read.began = time.monotonic()
            self._advance(read)

    def is_done(self, read: BlockRead[Key]) -> bool:
        """Put blocks into the pool once they have been read. Return whether the whole read has ended."""
        if read in self._prepared:
            return False
        self._advance(read)
        if not read.pieces and read.num_read and read.seconds:
            rate, before = read.num_read * self._pool.num_bytes / read.seconds, self.rates[_READ]
            self.rates[_READ] = (rate + before) / 2 if before else rate
        return not read.pieces

    def cancel(self, read: BlockRead[Key]) -> None:
        """End a read early. Afterwards no thread writes to its blocks."""
        if read in self._prepared:
            self._prepared.remove(read)
        wait([future for _, future in read.pieces if not future.cancel()])
        read.pieces.clear()

    def wait(self, reads: Sequence[BlockRead[Key]], seconds: float) -> None:
        """Begin the prepared reads, and wait until the first piece under way of one of ``reads`` has been read."""
        self.start()
        wait([read.pieces[0][1] for read in reads if read.pieces], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _advance(self, read: BlockRead[Key]) -> None:
        while read.pieces and read.pieces[0][1].done():
            incoming, future = read.pieces.popleft()
            if not read.failed:
                self._pool.put(incoming)
                read.num_read += (count := future.result())
                read.failed = count < len(incoming.blocks)
        while read.num_begun < len(read.blocks) and len(read.pieces) < _PIECES and not read.failed:
            first, read.num_begun = read.num_begun, min(len(read.blocks), read.num_begun + _PIECE)
            incoming = self._pool.incoming(read.blocks[first : read.num_begun])
            wanted = read.keys[first : read.num_begun]
            read.pieces.append((incoming, self._threads.submit(self._read_piece, read, incoming, wanted)))

    def _read_piece(self, read: BlockRead[Key], incoming: Incoming, wanted: Sequence[Key]) -> int:
        """Read blocks in a thread, up to the first missing or damaged block. Return the number of blocks read."""
        count = 0
        for key, buffers in zip(wanted, incoming.buffers, strict=True):
            if not self._read(key, buffers):
                break
            count += 1
        read.ended = time.monotonic()
        return count
