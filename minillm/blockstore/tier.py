"""The disk as a tier below the prefix cache of one engine.

Full blocks are copied out of the pool when they are committed to the prefix cache, and written in the background. While
the writer's queue is full, blocks wait in the pool until the queue has space or they are evicted. The engine's thread
calls all methods.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from minillm.blockstore import keys
from minillm.blockstore.files import BlockStore, erase
from minillm.blockstore.keys import BlockKey
from minillm.cache import BlockManager, BlockTable, CacheEvent
from minillm.cache.prefix_cache import Node
from minillm.outputs import StepReport
from minillm.progress import OnMessage
from minillm.runner.observers import StepObserver
from minillm.runner.pool_blocks import Buffers, Incoming, PoolBlocks
from minillm.runner.step import StepWork

_QUEUED_BYTES = 256 << 20
_BATCH = 64  # blocks copied out of the pool at a time
_PIECE, _PIECES = 8, 16  # blocks of one read; reads under way at a time for one prompt
_READERS = 4  # threads: a cold disk is faster with several reads at a time
_OVERHEAD = 0.002  # seconds of a read, in addition to its bytes
_FLUSH_SECONDS = 10.0  # at the end of the process
_TIMED_TOKENS = 32  # a step with fewer prompt tokens says little about the rate
_CLOSED = "closed"
_PREFILL, _READ = "prefill_tokens_per_second", "read_bytes_per_second"


@dataclass
class Found:
    """The blocks on disk that continue a prompt, in order. The last one may be partly filled."""

    keys: list[BlockKey]
    num_tokens: int  # of the prompt, up to the end of these blocks


@dataclass
class BlockRead:
    """A read of ``found`` into ``blocks`` of the pool."""

    found: Found
    blocks: list[int]
    num_begun: int = 0  # first blocks whose read has begun
    num_read: int = 0  # first blocks that are whole and in the pool
    failed: bool = False  # the block after them was missing or damaged
    pieces: deque[tuple[Incoming, Future[int]]] = field(default_factory=deque)  # under way, in order
    began: float = 0.0
    ended: float = 0.0  # when the last piece was read

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


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
        self._readers = ThreadPoolExecutor(_READERS, "minillm disk")
        self._writes: deque[tuple[Future[None], int]] = deque()  # under way, with their numbers of blocks
        self._most_queued = max(2, _QUEUED_BYTES // self.block_bytes)
        self._keys: dict[Node, BlockKey] = {}  # of the prefix cache's nodes
        self._saved: set[bytes] = set()  # hashes of blocks that are on disk or queued
        self._unsaved: dict[int, tuple[Node, BlockKey]] = {}  # by block in the pool
        self._leaving: list[tuple[int, BlockKey]] = []  # evicted blocks that the pool still has
        self._owners: dict[str, set[str]] = {}  # owner -> names of its blocks
        self._starting: list[BlockRead] = []
        about = store.about()
        self._rates = {name: float(about.get(name) or 0) for name in (_PREFILL, _READ)}
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
        self.start_reads()

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
        if end <= num_known:
            return None
        prefill, read = self._rates[_PREFILL], self._rates[_READ]
        reading = _OVERHEAD + len(found) * self.block_bytes / read if read else 0.0
        return None if prefill and (end - num_known) / prefill < reading else Found(found, end)

    def prepare_read(self, found: Found, blocks: list[int]) -> BlockRead:
        """Prepare to read ``found`` into ``blocks``, which no step uses. The read begins after the present step."""
        read = BlockRead(found, blocks)
        self._starting.append(read)
        return read

    def start_reads(self) -> None:
        """Begin the prepared reads."""
        starting, self._starting = self._starting, []
        for read in starting:
            self.store.touch(read.found.keys[-1])
            read.began = time.monotonic()
            self._advance(read)

    def is_done(self, read: BlockRead) -> bool:
        """Move the blocks that have been read to the pool. Return whether the read has ended."""
        if read not in self._starting:
            self._advance(read)
        return not read.pieces and read.num_begun > 0

    def _advance(self, read: BlockRead) -> None:
        while read.pieces and read.pieces[0][1].done():
            incoming, future = read.pieces.popleft()
            if not read.failed:
                self._pool.put(incoming)
                read.num_read += (count := future.result())
                read.failed = count < len(incoming.blocks)
        while read.num_begun < len(read.blocks) and len(read.pieces) < _PIECES and not read.failed:
            first, read.num_begun = read.num_begun, min(len(read.blocks), read.num_begun + _PIECE)
            incoming = self._pool.incoming(read.blocks[first : read.num_begun])
            wanted = read.found.keys[first : read.num_begun]
            read.pieces.append((incoming, self._readers.submit(self._read_piece, read, incoming, wanted)))

    def _read_piece(self, read: BlockRead, incoming: Incoming, wanted: list[BlockKey]) -> int:
        """Read blocks, in a reader's thread, up to the first failure. Return how many blocks were read."""
        count = 0
        for key, buffers in zip(wanted, incoming.buffers, strict=True):
            if not self.store.read(key, buffers):
                break
            count += 1
        read.ended = time.monotonic()
        return count

    def finish_read(self, read: BlockRead) -> int:
        """Account for an ended read. Return the number of tokens up to the end of the last block that was read."""
        found, count = read.found, read.num_read
        self.num_read += count
        self.read_seconds += read.seconds
        self.from_disk.update(read.blocks[:count])
        for observer in self._observers:
            observer.replace(read.blocks)
        self._saved.update(key.digest for key in found.keys[:count])
        self._saved.difference_update(key.digest for key in found.keys[count:])
        if count and read.seconds:
            rate, before = count * self.block_bytes / read.seconds, self._rates[_READ]
            self._rates[_READ] = (rate + before) / 2 if before else rate
        is_whole = count == len(found.keys)
        return found.num_tokens if is_whole else (found.keys[0].index + count) * self._cache.block_size

    def cancel_read(self, read: BlockRead) -> None:
        """End a read early. Afterwards no thread writes to its blocks."""
        if read in self._starting:
            self._starting.remove(read)
        wait([future for _, future in read.pieces if not future.cancel()])
        read.pieces.clear()

    def wait_for(self, reads: Sequence[BlockRead], seconds: float) -> None:
        """Begin the prepared reads, and wait until one of ``reads`` has made progress."""
        self.start_reads()
        wait([future for read in reads for _, future in read.pieces], seconds, FIRST_COMPLETED)

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

    def measure(self, step: StepReport) -> None:
        """Update the rate at which prompts are computed, from a step with prompt tokens only."""
        if step.num_prefill_tokens >= _TIMED_TOKENS and not step.num_decodes and step.seconds:
            # The best of the recent steps: others may have waited for a compiler or for other programs.
            self._rates[_PREFILL] = max(step.num_prefill_tokens / step.seconds, 0.9 * self._rates[_PREFILL])

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
                self.store.save_about({name: round(rate) for name, rate in self._rates.items() if rate})
        except Exception as error:  # the device has failed, the disk is full, or the interpreter ends
            self._turn_off(error)
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.problem = self.problem or _CLOSED


def _trim(store: BlockStore) -> None:
    """Look how much of the quota is used, and remove what is left of processes that were killed."""
    with suppress(OSError):
        store.trim()


def _erase_files(store: BlockStore, owner: str) -> None:
    with suppress(OSError):
        erase(store.root, owner)
