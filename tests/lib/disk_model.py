"""The plain-Python model of the cache, extended by a disk, with real files."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.block_files import IDENTITY, spoil
from lib.pool_model import POISON, PoolModel
from minillm.blockstore.files import BlockStore, listed
from minillm.blockstore.tier import DiskTier
from minillm.cache import BlockManager, SwapSpace
from minillm.engine.disk_reads import DiskReads
from minillm.engine.idle import IdleSequences, shared_length
from minillm.outputs import RequestMetrics
from minillm.sequence import Sequence

TOKENS = (3, 4, 5)


@dataclass
class FakeIncoming:
    blocks: list[int]
    buffers: list[list[memoryview]]


@dataclass
class FakePool:
    """Plays `PoolBlocks`: a block is its slots, 8 bytes each."""

    model: DiskModel

    @property
    def num_bytes(self) -> int:
        return 8 * self.model.block_size

    def snapshot(self, blocks: list[int], valid: int | None = None) -> Callable[[], list[list[memoryview]]]:
        size, copies = self.model.block_size, []
        for block in blocks:
            slots = self.model.slots[block * size : (block + 1) * size]
            if valid is not None:
                slots[valid:] = [0] * (size - valid)
            copies.append([memoryview(struct.pack(f"<{size}q", *slots))])
        return lambda: copies

    def incoming(self, blocks: list[int]) -> FakeIncoming:
        return FakeIncoming(blocks, [[memoryview(bytearray(self.num_bytes))] for _ in blocks])

    def put(self, incoming: FakeIncoming) -> None:
        size = self.model.block_size
        for block, [buffer] in zip(incoming.blocks, incoming.buffers, strict=True):
            self.model.slots[block * size : (block + 1) * size] = struct.unpack(f"<{size}q", buffer)


@dataclass(eq=False)
class FakeGroup:
    """The part of a group that `DiskReads` reads and writes."""

    salt: str | None = None
    owner: str | None = None
    parent: Sequence | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))


@dataclass
class DiskModel(PoolModel):
    """After any operations, restarts, kills and damage included, each sequence reads its own tokens."""

    directory: Path = Path()
    limit: int = 1 << 30
    num_disk_tokens: int = 0
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open()

    def _open(self) -> None:
        store = BlockStore(self.directory, IDENTITY, {}, self.limit)
        pool: Any = FakePool(self)
        self.tier = DiskTier(store, self.manager, pool, self.messages.append)
        self.idle = IdleSequences(self.manager)
        self.reads = DiskReads(self.tier, self.manager, self.idle, self._ids.__next__)

    def restart(self, *, killed: bool) -> None:
        """End the process, orderly or not, and start the next one on the same directory."""
        if not killed:
            self.tier.close()
        else:  # the writer's last blocks are lost
            self.tier._writer.shutdown(wait=True, cancel_futures=True)
        self.manager = BlockManager(self.num_blocks, self.block_size, prefix_caching=True)
        self.swap = SwapSpace(self.num_host_blocks)
        self.slots = [POISON] * len(self.slots)
        for each in (self.tokens, self.tables, self.away, self.pending, self.incoming):
            each.clear()
        self._open()

    def allocate(self, prompt: list[int] | None = None) -> int:
        prompt = prompt or []
        group: Any = FakeGroup()
        cached = self.manager.find_cached(prompt)
        fits = -(-len(prompt) // self.block_size) <= self.manager.num_free
        if prompt and fits and self.reads.begin(group, prompt, 0, cached):
            self.run_step()
            while group in self.reads.active:
                assert self.reads.wait(10)
                self.reads.collect()
            self.num_disk_tokens += group.metrics.num_disk_tokens
        shared = shared_length(group.parent, prompt)
        assert shared < max(1, len(prompt)), "nothing is left to compute"
        seq = next(self._ids)
        if shared:
            self.tables[seq] = self.manager.fork(group.parent.table, seq, shared)
            self.tokens[seq] = prompt[:shared]
            self.reads.release([group])
            return seq
        self.reads.release([group])
        return super().allocate(prompt)

    def run_step(self) -> None:
        nothing: Any = None
        self.tier.begin(nothing)
        super().run_step()
        for seq, table in self.tables.items():
            self.tier.add(table, self.tokens[seq], None)
        self.tier.end()

    def keep_tail(self, seq: int) -> None:
        """Save the partly filled last block of a sequence."""
        self.run_step()
        self.tier.add_tail(self.tables[seq], self.tokens[seq], None)

    def wait_for_writer(self) -> None:
        """Wait until the blocks that were given to the disk are written."""
        self.tier._writer.submit(bool).result()

    def damage(self, rng: random.Random) -> None:
        """Flip a byte of a block's file, or cut the file."""
        files = sorted(block.path for block in listed(self.directory))
        if files:
            with suppress(FileNotFoundError):  # the writer's thread has just evicted it
                spoil(Path(rng.choice(files)), rng)


def random_disk_history(model: DiskModel, rng: random.Random, length: int) -> None:
    """Do ``length`` random operations on prompts that often begin alike; check after some of them."""
    size, earlier = model.block_size, [[3]]
    for _ in range(length):
        seqs, choice = list(model.tables), rng.random()
        if not seqs or choice < 0.35:
            before = rng.choice(earlier)
            prompt = [*before[: rng.randint(0, 4 * size)], *rng.choices(TOKENS, k=rng.randint(0, size + 1))]
            earlier = [*earlier[-9:], prompt]
            seq = model.allocate(prompt)
            if not model.append(seq, 0, prompt[len(model.tokens[seq]) :]):
                model.free(seq)
        elif choice < 0.45:
            model.fork(rng.choice(seqs))
        elif choice < 0.6:
            model.append(rng.choice(seqs), 0, [rng.choice(TOKENS) for _ in range(rng.randint(1, 2 * size))])
        elif choice < 0.65:
            seq = rng.choice(seqs)
            model.free_tail(seq, rng.randint(0, len(model.tokens[seq])))
        elif choice < 0.8:
            model.free(rng.choice(seqs))
        elif choice < 0.85:
            model.keep_tail(rng.choice(seqs))
        elif choice < 0.88:
            model.swap_out(rng.sample(seqs, 1))
        elif choice < 0.91 and model.away:
            model.swap_in([rng.choice(list(model.away))])
        elif choice < 0.94:
            model.damage(rng)
        elif choice < 0.97:
            model.restart(killed=rng.random() < 0.5)
        else:
            model.wait_for_writer()  # so that later prompts read from disk, however busy the machine is
            model.manager.reset_prefix_cache()
        if rng.random() < 0.3:
            model.check()
    model.check()
