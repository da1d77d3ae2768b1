"""The disk as a tier below the prefix cache of one engine. The engine's thread calls all methods.

Full blocks are copied out of the pool when they are committed to the prefix cache, and written in the background. While
the writer's queue is full, blocks wait in the pool until the queue has space or they are evicted.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice, takewhile
from typing import Any

from minillm.blockstore.files import BlockStore, erase
from minillm.blockstore.keys import BlockKey, key_after, keys_after, root
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


class DiskTier(StepObserver):
    """Saves blocks of an engine to disk (``store``). Finds the saved blocks of a prompt, and reads them into the pool.

    ``observers``: the runner's observers, which are notified of the blocks that a read has overwritten.

    Attributes:
        from_disk: numbers of the pool's blocks that were read from disk.
        num_saved, num_read: counts of blocks since the start.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: BlockManager,
        pool: PoolBlocks,
        on_message: OnMessage,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.store, self._cache, self._pool, self._observers = store, cache, pool, observers
        self.problem = ""  # why the tier is off
        self.from_disk: set[int] = set()
        self.num_saved = self.num_read = 0
        self.read_seconds = 0.0
        self._on_message: OnMessage | None = on_message  # None: the problem is reported
        self._writer = ThreadPoolExecutor(1, "minillm disk")
        self._writes: deque[tuple[Future[Any], int]] = deque()  # under way, with their numbers of blocks
        self._most_queued = max(2, _QUEUED_BYTES // pool.num_bytes)
        self._keys: dict[Node, BlockKey] = {}  # of the prefix cache's nodes
        self._saved: set[str] = set()  # names of blocks that are on disk or queued
        self._unsaved: OrderedDict[int, tuple[Node, BlockKey]] = OrderedDict()  # by block in the pool
        self._leaving: list[tuple[int, BlockKey]] = []  # evicted blocks that the pool still has
        self.reader: BlockReader[BlockKey] = BlockReader(pool, store.read, store.about)
        self._writes.append((self._writer.submit(store.trim), 0))  # also removes what killed processes have left
        cache.subscribers.append(self._note)

    # --- saving -------------------------------------------------------------------------------------------------------

    def add(self, table: BlockTable, token_ids: Sequence[int], owner: str | None) -> None:
        """Save the blocks that ``table`` has committed since the last call.

        ``owner``: a name under which the blocks can be erased again; None: nobody erases them.
        """
        nodes, owned = table.nodes, None if owner is None else self.store.names_of(owner)
        first = len(nodes)
        while first and not ((key := self._keys.get(nodes[first - 1])) and (owned is None or key.name in owned)):
            first -= 1
        if first == len(nodes) or self.problem:
            return
        size = self._cache.block_size
        new = list(keys_after(self._parent(table, first), token_ids[: len(nodes) * size], size, first))
        for block, node, key in zip(table.blocks[first:], nodes[first:], new, strict=False):
            self._keys[node] = key
            if key.name not in self._saved:
                self._unsaved[block] = node, key
        self._add_names(owner, [key.name for key in new])
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
            key = key_after(self._parent(table, full), full, tokens)
            if key.name not in self._saved:
                self._add_names(owner, [key.name])
                self._save([(self._cache.content_of(table.blocks[full]), key)], len(tokens))

    def _parent(self, table: BlockTable, index: int) -> bytes:
        """Return the hash of the block before block ``index`` of a table."""
        return self._keys[table.nodes[index - 1]].digest if index else root(self.store.identity, table.salt)

    def _add_names(self, owner: str | None, names: Sequence[str]) -> None:
        if owner is not None:
            try:
                self.store.add_names(owner, names)
            except OSError as error:
                self._turn_off(error)

    def _note(self, event: CacheEvent) -> None:
        if event.kind in ("evict", "allocate"):
            self.from_disk.difference_update(event.blocks)
            gone = [(block, self._unsaved.pop(block)[1]) for block in event.blocks if block in self._unsaved]
            self._leaving += gone if event.kind == "evict" else []

    def begin(self, work: StepWork) -> None:
        self._save_evicted()

    def _save_evicted(self) -> None:
        """Copy evicted blocks out of the pool before a step or a read writes to them."""
        leaving, self._leaving = iter(self._leaving), []
        while taken := list(islice(leaving, min(_BATCH, self._free()))):
            self._save(taken)

    def end(self) -> None:
        self._save_some()
        self.reader.start()

    def prepare_ahead(self) -> bool:
        if self._unsaved and not self._free() and self._writes:
            wait([self._writes[0][0]], 0.05)
        self._save_some()
        return bool(self._unsaved)

    def _free(self) -> int:
        """Return how many more blocks fit into the writer's queue."""
        while self._writes and self._writes[0][0].done():
            self._writes.popleft()
        return 0 if self.problem else max(0, self._most_queued - sum(count for _, count in self._writes))

    def _save_some(self) -> None:
        """Queue unsaved blocks for the writer until its queue is full."""
        if self.problem:
            self._unsaved.clear()
            if self._on_message is not None:
                self._on_message(f"the disk cache is off: {self.store.root}: {self.problem}")
                self._on_message = None
        fitting = min(_BATCH, self._free()) if self._unsaved else 0
        taken: list[tuple[int, BlockKey]] = []
        while self._unsaved and len(taken) < fitting:
            block, (node, key) = self._unsaved.popitem(last=False)
            entry = self._cache.prefixes.entry(block)
            if entry is not None and entry.node == node and key.name not in self._saved:
                taken.append((block, key))
        if taken:
            self._save(taken)

    def _save(self, blocks: list[tuple[int, BlockKey]], valid: int | None = None) -> None:
        """Copy blocks out of the pool and queue them for the writer. ``valid``: see `PoolBlocks.snapshot`."""
        found = [key for _, key in blocks]
        self._saved.update(key.name for key in found)
        fetch = self._pool.snapshot([block for block, _ in blocks], valid)
        self._writes.append((self._writer.submit(self._write, fetch, found), len(blocks)))

    def _write(self, fetch: Callable[[], list[Buffers] | None], found: list[BlockKey]) -> None:
        """Write blocks in the writer's thread. ``fetch`` returns their bytes in order, or None to write nothing."""
        written = 0
        try:
            copies = None if self.problem else fetch()
            for key, buffers in zip(found, copies or (), strict=False):
                self._saved.difference_update(self.store.write(key, buffers))
                written += 1
        except FileNotFoundError:
            pass  # `minillm cache clear` has just removed the directory
        except Exception as error:
            self._turn_off(error)
        self.num_saved += written
        self._saved.difference_update(key.name for key in found[written:])

    def _turn_off(self, error: Exception) -> None:
        self.problem = self.problem or getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    # --- finding and reading ------------------------------------------------------------------------------------------

    def find(self, token_ids: Sequence[int], salt: str | None, num_known: int) -> tuple[list[BlockKey], int] | None:
        """Look for the blocks on disk that continue the first ``num_known`` tokens of a prompt.

        Return the blocks' keys, and the number of prompt tokens up to the end of the last block, which may be partly
        filled. Return None if the disk has no such blocks, or if computing is faster than reading. The prompt's last
        token is never read from disk: the engine must compute it to get its logits.
        """
        size, limit = self._cache.block_size, len(token_ids) - 1
        if self.problem or limit <= num_known:
            return None
        first, parent = num_known // size, root(self.store.identity, salt)
        full = keys_after(parent, token_ids[: limit // size * size], size)
        found = list(takewhile(lambda key: key.index < first or self.store.has(key), full))
        end, parent = len(found) * size, found[-1].digest if found else parent
        for length in range(min(size - 1, limit - end), 0, -1):
            key = key_after(parent, end // size, token_ids[end : end + length])
            if self.store.has(key):
                found.append(key)
                end += length
                break
        worthwhile = end > num_known and self.reader.is_worthwhile(end - num_known, len(found) - first)
        return (found[first:], end) if worthwhile else None

    def prepare_read(self, keys: Sequence[BlockKey], blocks: list[int]) -> BlockRead[BlockKey]:
        """Prepare to read into ``blocks`` of the pool. The read may begin although no step runs."""
        self._save_evicted()
        return self.reader.prepare(keys, blocks)

    def finish_read(self, read: BlockRead[BlockKey]) -> int:
        """Update the bookkeeping after a read has ended. Return the number of blocks that were read completely."""
        count = read.num_read
        self.num_read += count
        self.read_seconds += read.seconds
        self.from_disk.update(read.blocks[:count])
        for observer in self._observers:
            observer.replace(read.blocks)
        self._saved.update(key.name for key in read.keys[:count])
        self._saved.difference_update(key.name for key in read.keys[count:])
        if count:
            self.store.touch(read.keys[count - 1])
        return count

    def figures(self) -> dict[str, Any]:
        """Return the fields of `minillm.cache.CacheStats` that are about the disk."""
        return {
            "disk_limit": 0 if self.problem else self.store.limit,
            "disk_bytes": self.store.total,
            "num_disk_saved": self.num_saved,
            "num_disk_read": self.num_read,
            "disk_read_seconds": self.read_seconds,
        }

    def erase(self, owner: str) -> None:
        """Remove an owner's blocks from the disk. Blocks that other owners also use stay."""
        names = set(known := self.store.names_of(owner))
        known.clear()
        self._unsaved = OrderedDict(each for each in self._unsaved.items() if each[1][1].name not in names)
        self._leaving = [each for each in self._leaving if each[1].name not in names]
        self._saved -= names
        self._writes.append((self._writer.submit(erase, self.store.root, owner, names), 0))

    def forget(self) -> None:
        self._leaving.clear()  # the failed step may have written to these blocks

    def close(self) -> None:
        """Write all blocks that are queued or unsaved, within `_FLUSH_SECONDS`. Then stop the writer's thread."""
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
        self.problem, self._on_message = self.problem or "closed", None
