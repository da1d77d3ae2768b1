"""The files of blocks: one for each block, in a directory for each engine identity.

A file is written under a temporary name and renamed, and its header has a checksum. A file that is damaged, truncated
or of another program counts as missing and is removed. So there is no index, and processes can share the directory. All
processes keep to one quota. The least recently used blocks are removed first, and a block is removed before its parent,
the block that comes before it in its sequence.
"""

import hashlib
import json
import os
import re
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minillm.blockstore.keys import BlockKey
from minillm.errors import WeightsError
from minillm.system import cache_dir, expanded
from minillm.text.reading import read_json

_MAGIC = b"minillmB"
_HEADER = struct.Struct("<8s32sQI")  # magic, key, bytes of K and V, CRC-32 of them
_KEY = slice(8, 40)  # in the header
HEADER_BYTES = 64  # the header, its own CRC-32 and zeros
_NAME = re.compile(r"([0-9a-f]{6})-([0-9a-f]{16})-([0-9a-f]{32})")
_TEMPORARY = re.compile(r"\.(\d{1,9})-.*")  # of the process with this id
_HOME, _OWNER, ABOUT = re.compile(r"[0-9a-f]{32}"), "owner-", "about.json"
_MOST_BUFFERS = 1000  # of one system call; the limit of Linux is 1,024
_SPARED = 0.95  # of the quota that stays when blocks are removed, so that not every write removes some


def blocks_dir() -> Path:
    """Return the directory of all blocks: ``$MINILLM_DISK_CACHE``, or a subdirectory of the cache directory."""
    value = os.environ.get("MINILLM_DISK_CACHE")
    return expanded(value, "MINILLM_DISK_CACHE") if value else cache_dir() / "blocks"


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A block's file. ``parent`` and ``digest`` are the first hex digits of hashes; ``used`` is its last use, in ns."""

    path: str
    index: int
    parent: str
    digest: str
    num_bytes: int
    used: int


class BlockStore:
    """The blocks of one engine identity (weights, data types, block size and so on), stored below ``root``.

    Args:
        identity: see `keys.root`. The name of the blocks' own directory is derived from it.
        about: facts for people and for `minillm cache`, saved with the blocks.
        limit: quota in bytes for the blocks of all identities below ``root``.

    Raises:
        OSError: the directory cannot be created or written to.
    """

    def __init__(self, root: Path, identity: bytes, about: Mapping[str, Any], limit: int) -> None:
        self.root, self.identity, self.limit = root, identity, limit
        self.home = root / identity.hex()[:32]
        self.about = read_about(self.home) | dict(about)  # the saved facts, also those of earlier processes
        self.total = 0  # bytes below root as far as known
        self._unseen = 0  # bytes written since the last look
        self._newest = 0  # time of the most recent use, in ns
        self._owners: dict[str, set[str]] = {}  # owner -> names of its blocks
        self._make()

    def path(self, key: BlockKey) -> str:
        return f"{self.home}/{key.name}"

    def has(self, key: BlockKey) -> bool:
        return os.path.exists(self.path(key))

    def write(self, key: BlockKey, buffers: Sequence[memoryview]) -> list[str]:
        """Write a block. ``buffers`` hold its bytes in order. Return the names of blocks removed to stay in the quota.

        Raises OSError if the disk is full, read-only or broken.
        """
        if not self.has(key):  # otherwise another process has written it, or an earlier one
            size = self._write(key.name, [_header(key.digest, buffers), *buffers])
            self.total, self._unseen = self.total + size, self._unseen + size
        self.touch(key)
        unsure = self._unseen > max(self.limit // 16, 1 << 24)  # other processes write to the same quota
        return self.trim() if unsure or self.total > self.limit else []

    def read(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Read a block into ``buffers``. If the file does not hold this block, remove the file and return False."""
        return read_into(self.path(key), key.digest, buffers)

    def touch(self, key: BlockKey) -> None:
        """Record that a block was used now. All blocks before it in its sequence count as used as well."""
        self._newest = max(time.time_ns(), self._newest + 1)  # after all earlier uses, even if the clock was set back
        with suppress(OSError):
            os.utime(self.path(key), ns=(self._newest, self._newest))

    def trim(self) -> list[str]:
        """Remove the least recently used blocks if the quota is exceeded. Return the names of the removed blocks."""
        left, removed = trim(self.root, self.limit)
        self.total, self._unseen = bytes_of(left), 0
        self._newest = max([self._newest, *(block.used for block in left)])
        return [os.path.basename(block.path) for block in removed]

    def save_about(self, facts: Mapping[str, Any]) -> None:
        """Add ``facts`` to the saved facts about this identity. Raises OSError if the disk is full or read-only."""
        self.about |= facts
        self._write(ABOUT, [json.dumps(self.about, indent=1).encode()])

    def names_of(self, owner: str) -> set[str]:
        """Return the names of the blocks of an owner, such as a conversation."""
        if owner not in self._owners:
            self._owners[owner] = _names_in(self.home / owner_file(owner))
        return self._owners[owner]

    def add_names(self, owner: str, names: Sequence[str]) -> None:
        """Record blocks as used by an owner. Call this before the blocks are written. Raises OSError."""
        known = self.names_of(owner)
        if new := [name for name in names if name not in known]:
            known.update(new)
            if not self.home.is_dir():
                self._make()
            with open(self.home / owner_file(owner), "ab", 0, opener=_opener) as file:
                file.write("".join(f"{name}\n" for name in new).encode())  # one system call: processes do not mix

    def _make(self) -> None:
        """Make the directories: at the start, and after `minillm cache clear` or `minillm rm` has removed them."""
        for directory in (self.root, self.home):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (found := directory.stat()).st_uid == os.getuid() and found.st_mode & 0o077:
                directory.chmod(0o700)
        self.save_about({})

    def _write(self, name: str, buffers: Sequence[bytes | memoryview]) -> int:
        """Write a file under a temporary name, and rename it. Return its size in bytes."""
        if not self.home.is_dir():
            self._make()
        temporary = self.home / f".{os.getpid()}-{name}"
        try:
            with open(temporary, "wb", opener=_opener) as file:
                file.writelines(buffers)
            temporary.rename(self.home / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        return sum(map(len, buffers))


def _opener(path: str, flags: int) -> int:
    """Open a file that only the user may read, never through a link, and without waiting for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _header(digest: bytes, buffers: Sequence[memoryview]) -> bytes:
    """Return the header of the block that has this key and these bytes."""
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    header = _HEADER.pack(_MAGIC, digest, sum(map(len, buffers)), checksum)
    return (header + struct.pack("<I", zlib.crc32(header))).ljust(HEADER_BYTES, b"\0")


def read_into(path: str, digest: bytes | None, buffers: Sequence[memoryview]) -> bool:
    """Read a block's file into ``buffers``. If the file is damaged or has another size, remove it and return False.

    ``digest``: the key that the file must have; None: any key.
    """
    header = bytearray(HEADER_BYTES)
    wanted = [memoryview(header), *buffers]
    try:
        with open(path, "rb", 0, opener=_opener) as file:
            whole = os.fstat(file.fileno()).st_size == sum(map(len, wanted))
            for start in range(0, len(wanted) if whole else 0, _MOST_BUFFERS):
                os.readv(file.fileno(), wanted[start : start + _MOST_BUFFERS])
    except OSError:
        whole = False
    if not whole or header != _header(digest or bytes(header[_KEY]), buffers):
        with suppress(OSError):
            os.unlink(path)
        return False
    return True


# --- all identities ---------------------------------------------------------------------------------------------------


def homes(root: Path) -> list[Path]:
    """Return the directories of all engine identities below ``root``."""
    return sorted(path for path in root.glob("*/") if _HOME.fullmatch(path.name)) if root.is_dir() else []


def listed(root: Path) -> Iterator[BlockFile]:
    """Yield the blocks of all engine identities below ``root``. Remove the temporary files of ended processes."""
    for home in homes(root):
        yield from listed_in(home)


def listed_in(home: Path) -> Iterator[BlockFile]:
    """Yield the blocks in ``home``, the directory of one engine identity; see `listed`."""
    with suppress(FileNotFoundError), os.scandir(home) as entries:
        for entry in entries:
            if name := _NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield BlockFile(entry.path, int(name[1], 16), name[2], name[3], found.st_size, found.st_mtime_ns)
            elif (left := _TEMPORARY.fullmatch(entry.name)) and not _runs(int(left[1])):
                with suppress(OSError):
                    os.unlink(entry.path)


def bytes_of(blocks: Iterable[BlockFile]) -> int:
    return sum(block.num_bytes for block in blocks)


def trim(root: Path, limit: int) -> tuple[list[BlockFile], list[BlockFile]]:
    """Remove the least recently used blocks if the blocks below ``root`` take more than ``limit`` bytes in all.

    Return the remaining and the removed blocks. While another process removes blocks, remove none. Raises OSError.
    """
    blocks = eviction_order(listed(root))
    total, count = bytes_of(blocks), 0
    if total > limit:
        with suppress(Timeout), FileLock(root / ".lock", timeout=0, mode=0o600):
            while total > limit * _SPARED:
                with suppress(OSError):  # another process may just have removed it
                    os.unlink(blocks[count].path)
                total -= blocks[count].num_bytes
                count += 1
    return blocks[count:], blocks[:count]


def eviction_order(blocks: Iterable[BlockFile]) -> list[BlockFile]:
    """Sort blocks: the least recently used first, and each block before its parent (the block before it in a sequence).

    Using a block also counts as using all blocks before it.
    """
    used: defaultdict[tuple[str, str], int] = defaultdict(int)  # by directory and hash: last use of the blocks after it
    last: list[tuple[int, int, BlockFile]] = []
    for block in sorted(blocks, key=lambda block: -block.index):
        home = os.path.dirname(block.path)
        moment = max(block.used, used[home, block.digest[:16]])
        used[home, block.parent] = max(moment, used[home, block.parent])
        last.append((moment, -block.index, block))
    return [block for _, _, block in sorted(last, key=lambda each: each[:2])]


def owner_file(owner: str) -> str:
    """Return the name of the file that lists an owner's blocks. The name does not reveal the owner."""
    return _OWNER + hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def erase(root: Path, owner: str, names: Iterable[str] = ()) -> int:
    """Remove an owner's blocks from the directories of all engine identities. Return how many were removed.

    Blocks that other owners also use stay. ``names``: the owner's blocks, in case their list has been removed since
    they were queued for writing. Raises OSError.
    """
    count = 0
    for home in homes(root):
        file = home / owner_file(owner)
        others = (path for path in home.glob(f"{_OWNER}*") if path != file)
        own = _names_in(file).union(names)
        for name in own.difference(*map(_names_in, others)) if own else ():
            with suppress(FileNotFoundError):
                os.unlink(file.with_name(name))
                count += 1
        file.unlink(missing_ok=True)
    return count


def read_about(home: Path) -> dict[str, Any]:
    """Return the saved facts about the engine identity in ``home``, such as its model; empty if missing or damaged."""
    with suppress(WeightsError):
        return read_json(home / ABOUT)
    return {}


def _names_in(path: Path) -> set[str]:
    with suppress(OSError):
        return set(filter(_NAME.fullmatch, path.read_text(encoding="ascii", errors="replace").splitlines()))
    return set()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
