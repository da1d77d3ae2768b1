"""Free blocks of the pool, kept as runs of consecutive ids.

The CPU reads a table of consecutive blocks without a gather, and a GPU reads it in long bursts. The allocator therefore
prefers the block right after a sequence's last one, as TokenAttention does (LightLLM). A new sequence takes the middle
of the longest run, so that it and the sequences around it can grow. Runs are kept in size classes by powers of two, as
in the TLSF allocator (Masmano et al. 2004): every call is O(1) per block.
"""


class FreeBlocks:
    """The free blocks among ``0 … num_blocks - 1``; all are free at first."""

    def __init__(self, num_blocks: int) -> None:
        self._is_free = bytearray(b"\x01") * num_blocks
        self._length = [0] * num_blocks  # first block of a run of free blocks -> the run's length
        self._start = [0] * num_blocks  # last block of a run of free blocks -> the run's first block
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        self._nonempty = 0  # bit c: class c holds a run
        self._count = num_blocks
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return self._count

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` free blocks, in few runs of consecutive ids. Begin with block ``after + 1`` if it is free.

        The caller ensures that ``count <= len(self)``.
        """
        taken: list[int] = []
        if after is not None and after + 1 < len(self._is_free) and self._is_free[after + 1]:
            taken = self._take_from(after + 1, after + 1, min(count, self._length[after + 1]))
        while len(taken) < count:
            wanted = count - len(taken)
            start = self._longest_run(wanted)
            length = self._length[start]
            if length <= wanted or start == 0:
                taken += self._take_from(start, start, min(length, wanted))
            else:
                taken += self._take_from(start, start + (length - wanted) // 2, wanted)
        return taken

    def put(self, block: int) -> None:
        """Free one block."""
        if self._is_free[block]:
            raise AssertionError(f"block {block} is freed twice")
        self._is_free[block] = 1
        self._count += 1
        start, end = block, block
        if block and self._is_free[block - 1]:
            start = self._start[block - 1]
            self._remove(start)
        if block + 1 < len(self._is_free) and self._is_free[block + 1]:
            end = block + self._length[block + 1]
            self._remove(block + 1)
        self._insert(start, end - start + 1)

    def runs(self) -> list[tuple[int, int]]:
        """Return (first block, number of blocks) of every run of free blocks, in order."""
        return sorted((start, self._length[start]) for size_class in self._classes for start in size_class)

    def _longest_run(self, wanted: int) -> int:
        """Return the first block of a run from the largest size class. Prefer a run of ``wanted`` blocks or more."""
        candidates = self._classes[self._nonempty.bit_length() - 1]
        for tried, start in enumerate(candidates):
            if self._length[start] >= wanted or tried == 8:
                return start
        return next(iter(candidates))

    def _take_from(self, run: int, first: int, count: int) -> list[int]:
        """Take blocks ``first … first + count - 1`` out of the free run that starts at block ``run``; return them."""
        length = self._length[run]
        self._remove(run)
        if first > run:
            self._insert(run, first - run)
        end = first + count
        if end < run + length:
            self._insert(end, run + length - end)
        self._is_free[first:end] = bytes(count)
        self._count -= count
        return list(range(first, end))

    def _insert(self, start: int, length: int) -> None:
        """Add a run of free blocks to the list of its size class."""
        self._length[start] = length
        self._start[start + length - 1] = start
        size_class = length.bit_length()
        self._classes[size_class][start] = None
        self._nonempty |= 1 << size_class

    def _remove(self, start: int) -> None:
        """Remove a run from the list of its size class."""
        size_class = self._length[start].bit_length()
        del self._classes[size_class][start]
        if not self._classes[size_class]:
            self._nonempty &= ~(1 << size_class)
