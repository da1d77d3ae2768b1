"""Blocks whose bytes follow from their keys, and processes that write, read and evict them until they are killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from minillm.blockstore import keys
from minillm.blockstore.files import BlockStore, listed
from minillm.cli.cache import is_whole

SIZE = 5000
IDENTITY = bytes(range(32))


def content(key: keys.BlockKey) -> bytes:
    return (key.digest * (SIZE // 32 + 1))[:SIZE]


def chain(tokens: list[int], salt: str | None = None) -> list[keys.BlockKey]:
    """Return the keys of a sequence with one token in each block."""
    return list(keys.keys_after(keys.root(IDENTITY, salt), tokens, 1))


def store_in(directory: Path, limit: int = 1 << 30) -> BlockStore:
    return BlockStore(directory, IDENTITY, {"model": "tiny"}, limit)


def write(store: BlockStore, key: keys.BlockKey) -> list[str]:
    return store.write(key, [memoryview(content(key)[:77]), memoryview(content(key)[77:])])


def read(store: BlockStore, key: keys.BlockKey) -> bool:
    """Return whether the store has the block. Whatever it says, no other bytes may pass as the block's."""
    buffers = [bytearray(1000) for _ in range(SIZE // 1000)]
    found = store.read(key, [memoryview(buffer) for buffer in buffers])
    assert not found or b"".join(buffers) == content(key), "a wrong block was read"
    return found


def spoil(path: Path, rng: random.Random) -> None:
    """Flip a bit of a file, or cut the file."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3 or not data:
        del data[rng.randrange(len(data) + 1) :]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _work(directory: Path, seed: int) -> None:
    rng, store = random.Random(seed), store_in(directory, 40 * (SIZE + 64))
    while True:
        [key] = chain([rng.randrange(60)])
        if rng.random() < 0.6:
            write(store, key)
        elif read(store, key):
            store.touch(key)


def _start(directory: Path, seed: int) -> int:
    """Start a process that works until it is killed. Return its id."""
    process = os.fork()
    if not process:
        try:
            _work(directory, seed)
        finally:
            os._exit(1)
    return process


def kill_at_random(directory: Path, times: int, seed: int) -> None:
    """Let two processes work at a time, and kill each at a random moment."""
    rng, started = random.Random(seed), 0
    running = [_start(directory, seed), _start(directory, seed + 1)]
    while started < times:
        time.sleep(rng.random() * 0.02)
        victim = running.pop(rng.randrange(2))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        assert os.WIFSIGNALED(status), "a process read a wrong block, or failed"
        started += 1
        running.append(_start(directory, seed + 1 + started))
        if started % 10 == 0:
            assert all(is_whole(block) for block in listed(directory) if Path(block.path).exists())
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert all(is_whole(block) for block in listed(directory)), "a file under its final name is whole"
    left = [path for path in directory.rglob(".*-*") if path.is_file()]
    assert not left, "temporary files of dead processes are removed"
    assert any(read(store_in(directory), chain([number])[0]) for number in range(60))


if __name__ == "__main__":
    kill_at_random(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
