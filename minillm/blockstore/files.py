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
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minillm.blockstore.keys import BlockKey
from minillm.system import cache_dir, expanded

_MAGIC = b"minillmB"
_HEADER = struct.Struct("<8s32sQI")  # magic, key, bytes of K and V, CRC-32 of them
HEADER_BYTES = 64  # the header, its own CRC-32 and zeros
_NAME = re.compile(r"([0-9a-f]{6})-([0-9a-f]{16})-([0-9a-f]{32})")
_TEMPORARY = re.compile(r"\.(\d{1,10})-.*")
_HOME, _OWNER, ABOUT = re.compile(r"[0-9a-f]{32}"), "owner-", "about.json"
_MOST_BUFFERS = 1000  # of one system call; the limit of Linux is 1,024
_SPARED = 0.95  # of the quota that stays when blocks are removed, so that not every write removes some


def blocks_dir() -> Path:
    """Return the directory of all blocks: ``$MINILLM_DISK_CACHE``, or a part of the cache directory."""
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
    """The blocks of one engine identity (weights, data types, block size and so on) in the directory ``root``.

    Args:
        identity: see `keys.root`; it names the directory of these blocks.
        about: facts for people and for `minillm cache`, saved with the blocks.
        limit: quota in bytes for all blocks below ``root``.

    Raises:
        OSError: the directory cannot be created or written to.
    """

    def __init__(self, root: Path, identity: bytes, about: Mapping[str, Any], limit: int) -> None:
        self.root, self.limit = root, limit
        self.home = root / identity.hex()[:32]
        self._about = dict(about)
        self.total = 0  # bytes below root as far as known
        self._unseen = 0  # bytes written since the last look
        self._newest = 0  # time of the most recent use, in ns
        self._make()
        if not os.access(self.home, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13), str(self.home))

    def path(self, key: BlockKey) -> str:
        return f"{self.home}/{key.name}"

    def has(self, key: BlockKey) -> bool:
        return os.path.exists(self.path(key))

    def write(self, key: BlockKey, buffers: Sequence[memoryview]) -> list[str]:
        """Write a block; ``buffers`` hold its bytes in order. Return the names of blocks removed to keep the quota.

        Raises:
            OSError: the disk is full, read-only or broken.
        """
        if self.has(key):  # of another process, or of an earlier one
            self.touch(key)
            return []
        size, checksum = sum(map(len, buffers)), 0
        for buffer in buffers:
            checksum = zlib.crc32(buffer, checksum)
        header = _header(key.digest, size, checksum)
        temporary = f"{self.home}/.{os.getpid()}-{key.name}"
        try:
            self._write(temporary, [memoryview(header), *buffers])
        except FileNotFoundError:  # `minillm cache clear` or `minillm rm` has removed the directory
            self._make()
            self._write(temporary, [memoryview(header), *buffers])
        os.rename(temporary, self.path(key))
        self._unseen += size
        self.total += size
        if self.total > self.limit or self._unseen > max(self.limit // 16, 1 << 24):
            return self.trim()
        return []

    def read(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Read a block into ``buffers``. Return False, and remove the file, if it does not hold this block."""
        path = self.path(key)
        try:
            whole = read_into(path, key.digest, buffers)
        except FileNotFoundError:
            return False
        except OSError:
            whole = False
        if not whole:
            with suppress(OSError):
                os.unlink(path)
        return whole

    def touch(self, key: BlockKey) -> None:
        """Record that a block, and so the blocks before it, were used now."""
        with suppress(OSError):
            os.utime(self.path(key), ns=(moment := self._now(), moment))

    def trim(self) -> list[str]:
        """Remove blocks until the quota is kept. Return their names."""
        left, removed = trim(self.root, self.limit)
        self.total, self._unseen = sum(block.num_bytes for block in left), 0
        self._newest = max(self._newest, max((block.used for block in left), default=0))
        return [os.path.basename(block.path) for block in removed]

    def about(self) -> dict[str, Any]:
        """Return the saved facts."""
        return read_about(self.home)

    def save_about(self, facts: Mapping[str, Any]) -> None:
        """Add ``facts`` to the saved ones. Raises OSError if the disk is full or read-only."""
        self._about |= facts
        temporary = self.home / f".{os.getpid()}-{ABOUT}"
        with suppress(FileNotFoundError):
            self._write(str(temporary), [memoryview(json.dumps(self._about, indent=1).encode())])
            temporary.rename(self.home / ABOUT)

    # --- owners -------------------------------------------------------------------------------------------------------

    def names_of(self, owner: str) -> set[str]:
        """Return the names of the blocks of an owner, such as a conversation."""
        return _names_in(self.home / owner_file(owner))

    def add_names(self, owner: str, names: Sequence[str]) -> None:
        """Record blocks as used by an owner. Call this before the blocks are written. Raises OSError."""
        if not os.path.isdir(self.home):
            self._make()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        number = os.open(self.home / owner_file(owner), flags, 0o600)
        try:
            os.write(number, "".join(f"{name}\n" for name in names).encode())
        finally:
            os.close(number)

    def _make(self) -> None:
        for directory in (self.root, self.home):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (found := directory.stat()).st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077:
                directory.chmod(0o700)
        if not (self.home / ABOUT).exists():
            self.save_about({})

    def _write(self, path: str, buffers: list[memoryview]) -> None:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            for start in range(0, len(buffers), _MOST_BUFFERS):
                part = buffers[start : start + _MOST_BUFFERS]
                while part:
                    part = _after(part, os.writev(number, part))
            os.utime(number, ns=(moment := self._now(), moment))
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(number)

    def _now(self) -> int:
        """Return the time for a use: later than all earlier uses, even if the clock was set back."""
        self._newest = max(time.time_ns(), self._newest + 1)
        return self._newest


def _header(digest: bytes, size: int, checksum: int) -> bytes:
    header = _HEADER.pack(_MAGIC, digest, size, checksum)
    return (header + struct.pack("<I", zlib.crc32(header))).ljust(HEADER_BYTES, b"\0")


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return the buffers without their first ``done`` bytes."""
    while buffers and done >= len(buffers[0]):
        done -= len(buffers.pop(0))
    if done:
        buffers[0] = buffers[0][done:]
    return buffers


def read_into(path: str, digest: bytes | None, buffers: Sequence[memoryview]) -> bool:
    """Read a block's file into ``buffers``. Return whether the file is complete, with the right checksum.

    ``digest``: the key that the file must have; None: any key.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found, size = os.fstat(number), sum(map(len, buffers))
        if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + size:
            return False
        header = bytearray(HEADER_BYTES)
        if os.preadv(number, [header], 0) != HEADER_BYTES:
            return False
        _, key, length, checksum = _HEADER.unpack_from(header)
        if header != _header(key, length, checksum) or length != size:
            return False
        if digest is not None and key != digest:
            return False
        at = HEADER_BYTES
        for start in range(0, len(buffers), _MOST_BUFFERS):
            part = list(buffers[start : start + _MOST_BUFFERS])
            while part:
                if not (done := os.preadv(number, part, at)):
                    return False
                part, at = _after(part, done), at + done
    finally:
        os.close(number)
    actual = 0
    for buffer in buffers:
        actual = zlib.crc32(buffer, actual)
    return actual == checksum


# --- all identities ---------------------------------------------------------------------------------------------------


def homes(root: Path) -> list[Path]:
    """Return the directories of all engine identities below ``root``."""
    return sorted(path for path in root.glob("*/") if _HOME.fullmatch(path.name)) if root.is_dir() else []


def listed(root: Path) -> Iterator[BlockFile]:
    """Yield the blocks of all identities below ``root``. Remove the temporary files of processes that have ended."""
    for home in homes(root):
        yield from listed_in(home)


def listed_in(home: Path) -> Iterator[BlockFile]:
    """Yield the blocks in the directory of one identity; see `listed`."""
    with suppress(FileNotFoundError), os.scandir(home) as entries:
        for entry in entries:
            if name := _NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield BlockFile(entry.path, int(name[1], 16), name[2], name[3], found.st_size, found.st_mtime_ns)
            elif (left := _TEMPORARY.fullmatch(entry.name)) and not _runs(int(left[1])):
                with suppress(OSError):
                    os.unlink(entry.path)


def trim(root: Path, limit: int) -> tuple[list[BlockFile], list[BlockFile]]:
    """Remove blocks if all of them have more than ``limit`` bytes. Return the blocks that stay and the removed ones.

    Removes none while another process removes some. Raises OSError.
    """
    blocks, removed = list(listed(root)), []
    if sum(block.num_bytes for block in blocks) > limit:
        with suppress(Timeout), FileLock(root / ".lock", timeout=0, mode=0o600):
            blocks = list(listed(root))  # another process may just have removed some
            total = sum(block.num_bytes for block in blocks)
            for block in eviction_order(blocks) if total > limit else ():
                if total <= limit * _SPARED:
                    break
                with suppress(OSError):
                    os.unlink(block.path)
                total -= block.num_bytes
                removed.append(block)
    gone = {block.path for block in removed}
    return [block for block in blocks if block.path not in gone], removed


def eviction_order(blocks: Iterable[BlockFile]) -> list[BlockFile]:
    """Sort blocks: the least recently used first, and each block before its parent.

    A use of a block is a use of all blocks before it.
    """
    used: dict[tuple[str, str], int] = {}  # by directory and prefix of the hash: last use, of later blocks too
    last: list[tuple[int, int, BlockFile]] = []
    for block in sorted(blocks, key=lambda block: -block.index):
        home = os.path.dirname(block.path)
        moment = max(block.used, used.get((home, block.digest[:16]), 0))
        parent = (home, block.parent)
        used[parent] = max(moment, used.get(parent, 0))
        last.append((moment, -block.index, block))
    return [block for _, _, block in sorted(last, key=lambda each: each[:2])]


def owner_file(owner: str) -> str:
    """Return the name of the file that lists an owner's blocks. The name does not reveal the owner."""
    return _OWNER + hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def erase(root: Path, owner: str) -> int:
    """Remove an owner's blocks of all identities, unless other owners also use them. Return how many were removed.

    Raises OSError.
    """
    count = 0
    for home in homes(root):
        file = home / owner_file(owner)
        if not file.exists():
            continue
        others = (path for path in home.glob(f"{_OWNER}*") if path.name != file.name)
        for name in _names_in(file).difference(*map(_names_in, others)):
            with suppress(FileNotFoundError):
                os.unlink(home / name)
                count += 1
        file.unlink(missing_ok=True)
    return count


def read_about(home: Path) -> dict[str, Any]:
    """Return the facts about an identity; empty if they are missing or damaged."""
    with suppress(OSError, ValueError):
        facts = json.loads((home / ABOUT).read_bytes()[: 1 << 16])
        return facts if isinstance(facts, dict) else {}
    return {}


def _names_in(path: Path) -> set[str]:
    with suppress(OSError):
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        return {line for line in lines if _NAME.fullmatch(line)}
    return set()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
