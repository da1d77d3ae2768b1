"""The disk as a tier below the prefix cache of one engine.

Full blocks are copied out of the pool when they are committed to the prefix cache, and written in the background. While
the writer's queue is full, blocks wait in the pool until the queue has space or they are evicted. The engine's thread
calls all methods.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minillm.blockstore import keys
from minillm.blockstore.files import BlockStore, erase
from minillm.blockstore.keys import BlockKey
from minillm.cache import BlockManager, BlockTable, CacheEvent
from minillm.cache.prefix_cache import Node
from minillm.progress import OnMessage
from minillm.runner.block_reads import BlockRead, BlockReader
from minillm.runner.observers import StepObserver
from minillm.runner.pool_blocks import Buffers, PoolBlocks
from minillm.runner.step import StepWork

_QUEUED_BYTES = 256 << 20
_BATCH = 64  # blocks copied out of the pool at a time
_FLUSH_SECONDS = 10.0  # at the end of the process
_CLOSED = "closed"


@dataclass
class Found:
    """The blocks on disk that continue a prompt, in order. The last one may be partly filled."""

    keys: list[BlockKey]
    num_tokens: int  # of the prompt, up to the end of these blocks


class DiskTier(StepObserver):
    """Saves the blocks of an engine to ``store``, finds them again and reads them.

    ``observers`` are those of the engine's runner.

    Attributes:
        from_disk: blocks in the pool that came from disk.
        num_saved, num_read: blocks since the start.
        num_lost: evicted blocks that were not saved because the writer's queue was full.
    """

    def __init__(
        self,
        store: BlockStore,
        identity: bytes,
        cache: BlockManager,
        pool: PoolBlocks,
        on_message: OnMessage,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.store, self.block_bytes = store, pool.num_bytes
        self.problem = ""  # why the tier is off
        self.from_disk: set[int] = set()
        self.num_saved = self.num_read = self.num_lost = 0
        self.read_seconds = 0.0
        self._observers = observers
        self._identity, self._cache, self._pool = identity, cache, pool
        self._on_message: OnMessage | None = on_message  # None: the problem is reported
        self._writer = ThreadPoolExecutor(1, "minillm disk")
        self._writes: deque[tuple[Future[None], int]] = deque()  # under way, with their numbers of blocks
        self._most_queued = max(2, _QUEUED_BYTES // self.block_bytes)
        self._keys: dict[Node, BlockKey] = {}  # of the prefix cache's nodes
        self._saved: set[bytes] = set()  # hashes of blocks that are on disk or queued
        self._unsaved: dict[int, tuple[Node, BlockKey]] = {}  # by block in the pool
        self._leaving: list[tuple[int, BlockKey]] = []  # evicted blocks that the pool still has
        self._owners: dict[str, set[str]] = {}  # owner -> names of its blocks
        self.reader: BlockReader[BlockKey] = BlockReader(pool, store.read, store.about())
        self._writes.append((self._writer.submit(_trim, store), 0))
        cache.subscribers.append(self._note)

    # --- saving -------------------------------------------------------------------------------------------------------

    def add(self, table: BlockTable, token_ids: Sequence[int], owner: str | None) -> None:
        """Save the blocks that ``table`` has committed since the last call.

        ``owner``: a name under which the blocks can be erased again; None: nobody erases them.
        """
        nodes, names = table.nodes, self._names(owner)
        first = len(nodes)
        while first and not self._is_known(nodes[first - 1], names):
            first -= 1
        if first == len(nodes) or self.problem:
            return
        size, new = self._cache.block_size, []
        for index in range(first, len(nodes)):
            parent = self._parent(table, index)
            key = self._keys[nodes[index]] = keys.key_after(parent, index, token_ids[index * size : (index + 1) * size])
            new.append(key.name)
            if key.digest not in self._saved:
                self._unsaved[table.blocks[index]] = nodes[index], key
        self._add_names(owner, new)
        self._save_some()
        if len(self._keys) > 4 * self._cache.num_blocks + 1024:  # nodes that nobody has any more
            alive = self._cache.prefixes.nodes().union(*(each.nodes for each in self._cache.tables.values()))
            self._keys = {node: key for node, key in self._keys.items() if node in alive}

    def add_tail(self, table: BlockTable, token_ids: Sequence[int], owner: str | None) -> None:
        """Save the partly filled last block of a kept sequence. ``token_ids``: its tokens with K and V."""
        size, full = self._cache.block_size, len(table.nodes)
        tokens = token_ids[full * size :]
        known = not full or table.nodes[-1] in self._keys
        if known and 0 < len(tokens) < size and full < len(table.blocks) and self._free() and not self.problem:
            key = keys.key_after(self._parent(table, full), full, tokens)
            if key.digest not in self._saved:
                self._add_names(owner, [key.name])
                self._save([(self._cache.content_of(table.blocks[full]), key)], len(tokens))

    def _parent(self, table: BlockTable, index: int) -> bytes:
        """Return the hash of the block before block ``index`` of a table."""
        return self._keys[table.nodes[index - 1]].digest if index else keys.root(self._identity, table.salt)

    def _is_known(self, node: Node, names: set[str] | None) -> bool:
        key = self._keys.get(node)
        return key is not None and (names is None or key.name in names)

    def _names(self, owner: str | None) -> set[str] | None:
        if owner is not None and owner not in self._owners:
            self._owners[owner] = self.store.names_of(owner)
        return None if owner is None else self._owners[owner]

    def _add_names(self, owner: str | None, names: list[str]) -> None:
        if owner is not None and (new := [name for name in names if name not in (self._names(owner) or ())]):
            self._owners[owner].update(new)
            try:
                self.store.add_names(owner, new)
            except OSError as error:
                self._turn_off(error)

    def _note(self, event: CacheEvent) -> None:
        if event.kind in ("evict", "allocate"):
            self.from_disk.difference_update(event.blocks)
            for block in event.blocks:
                if (entry := self._unsaved.pop(block, None)) is not None and event.kind == "evict":
                    self._leaving.append((block, entry[1]))

    def begin(self, work: StepWork) -> None:
        """Copy evicted blocks out of the pool before the step writes to them."""
        leaving, self._leaving = iter(self._leaving), []
        while taken := list(islice(leaving, min(_BATCH, self._free()))):
            self._save(taken)
        self.num_lost += sum(1 for _ in leaving)

    def end(self) -> None:
        self._save_some()
        self.reader.start()

    def prepare_ahead(self) -> bool:
        if self._unsaved and not self._free():
            wait([self._writes[0][0]], 0.05)
        self._save_some()
        return bool(self._unsaved)

    def _free(self) -> int:
        """Return how many more blocks the writer's queue takes."""
        while self._writes and self._writes[0][0].done():
            self._writes.popleft()
        return 0 if self.problem else max(0, self._most_queued - sum(count for _, count in self._writes))

    def _save_some(self) -> None:
        """Save unsaved blocks while the writer's queue takes them."""
        if self.problem:
            self._unsaved.clear()
            if self._on_message is not None and self.problem != _CLOSED:
                self._on_message(f"the disk cache is off: {self.store.root}: {self.problem}")
                self._on_message = None
        fitting = min(_BATCH, self._free()) if self._unsaved else 0
        taken: list[tuple[int, BlockKey]] = []
        while self._unsaved and len(taken) < fitting:
            block, (node, key) = next(iter(self._unsaved.items()))
            del self._unsaved[block]
            entry = self._cache.prefixes.entry(block)
            if entry is not None and entry.node == node and key.digest not in self._saved:
                taken.append((block, key))
        if taken:
            self._save(taken)

    def _save(self, blocks: list[tuple[int, BlockKey]], valid: int | None = None) -> None:
        """Copy blocks out of the pool and queue them for the writer. ``valid``: see `PoolBlocks.snapshot`."""
        found = [key for _, key in blocks]
        self._saved.update(key.digest for key in found)
        fetch = self._pool.snapshot([block for block, _ in blocks], valid)
        self._writes.append((self._writer.submit(self._write, fetch, found), len(blocks)))

    def _write(self, fetch: Callable[[], list[Buffers] | None], found: list[BlockKey]) -> None:
        """Write blocks, in the writer's thread."""
        written = 0
        try:
            copies = None if self.problem else fetch()
            for key, buffers in zip(found, copies or (), strict=False):
                if removed := self.store.write(key, buffers):
                    self._forget(removed)
                written += 1
        except FileNotFoundError:
            pass  # `minillm cache clear` has just removed the directory
        except Exception as error:
            self._turn_off(error)
        self.num_saved += written
        self._saved.difference_update(key.digest for key in found[written:])

    def _forget(self, names: Sequence[str]) -> None:
        """Note that these blocks are not on disk any more."""
        ends = {name.rpartition("-")[2] for name in names}
        self._saved.difference_update([digest for digest in list(self._saved) if digest.hex()[:32] in ends])

    def _turn_off(self, error: Exception) -> None:
        self.problem = self.problem or getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    # --- finding and reading ------------------------------------------------------------------------------------------

    def find(self, token_ids: Sequence[int], salt: str | None, num_known: int) -> Found | None:
        """Look for the blocks on disk that continue the first ``num_known`` tokens of a prompt.

        Return None if there are none, or if computing their tokens is faster than reading them. The last token is never
        looked for, since its logits are needed.
        """
        size, limit = self._cache.block_size, len(token_ids) - 1
        first, parent = num_known // size, keys.root(self._identity, salt)
        found: list[BlockKey] = []
        if self.problem or limit <= num_known:
            return None
        for key in keys.keys_after(parent, token_ids[: limit // size * size], size):
            if key.index >= first:
                if not self.store.has(key):
                    break
                found.append(key)
            parent = key.digest
        end = (first + len(found)) * size
        for length in range(min(size - 1, limit - end), 0, -1):
            key = keys.key_after(parent, end // size, token_ids[end : end + length])
            if self.store.has(key):
                found.append(key)
                end += length
                break
        found_enough = end > num_known and self.reader.is_worthwhile(end - num_known, len(found))
        return Found(found, end) if found_enough else None

    def finish_read(self, read: BlockRead[BlockKey]) -> int:
        """Account for an ended read of blocks that were found. Return the number of whole blocks."""
        count = read.num_read
        self.num_read += count
        self.read_seconds += read.seconds
        self.from_disk.update(read.blocks[:count])
        for observer in self._observers:
            observer.replace(read.blocks)
        self._saved.update(key.digest for key in read.keys[:count])
        self._saved.difference_update(key.digest for key in read.keys[count:])
        if count:
            self.store.touch(read.keys[count - 1])
        return count

    # --- the rest -----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return the fields about the disk of `minillm.cache.CacheStats`."""
        return {
            "disk_limit": 0 if self.problem else self.store.limit,
            "disk_bytes": self.store.total,
            "num_disk_saved": self.num_saved,
            "num_disk_read": self.num_read,
            "disk_read_seconds": self.read_seconds,
        }

    def erase(self, owner: str) -> None:
        """Remove an owner's blocks from the disk, except blocks of other owners."""
        names = self._names(owner) or set()
        self._owners.pop(owner, None)
        self._unsaved = {block: each for block, each in self._unsaved.items() if each[1].name not in names}
        self._leaving = [each for each in self._leaving if each[1].name not in names]
        self._forget(list(names))
        self._writes.append((self._writer.submit(_erase_files, self.store, owner), 0))

    def forget(self) -> None:
        self._leaving.clear()  # the failed step may have written to these blocks

    def close(self) -> None:
        """Write the blocks that are not on disk yet, and stop."""
        if self._note not in self._cache.subscribers:
            return
        self._cache.subscribers.remove(self._note)
        end = time.monotonic() + _FLUSH_SECONDS
        try:
            while self.prepare_ahead() and time.monotonic() < end:
                pass
            wait([future for future, _ in self._writes], max(0.0, end - time.monotonic()))
            if not self.problem:
                self.store.save_about({name: round(rate) for name, rate in self.reader.rates.items() if rate})
        except Exception as error:  # the device has failed, the disk is full, or the interpreter ends
            self._turn_off(error)
        self._writer.shutdown(wait=False)
        self.reader.close()
        self.problem = self.problem or _CLOSED


def _trim(store: BlockStore) -> None:
    """Look how much of the quota is used, and remove what is left of processes that were killed."""
    with suppress(OSError):
        store.trim()


def _erase_files(store: BlockStore, owner: str) -> None:
    with suppress(OSError):
        erase(store.root, owner)
