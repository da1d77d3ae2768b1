"""The header of a GGUF file: metadata, and the position of each tensor.

The gguf library has a reader, but that reader trusts the counts in the file: a forged array length keeps it busy
forever. It also takes three seconds for the strings of 49,000 tokens. The reader in this module checks every count and
offset against the file's size before it reads or allocates anything. It returns plain Python values.

Format: ggml's docs/gguf.md. Versions 2 and 3, little-endian.
"""

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.errors import WeightsError
from minillm.text.reading import open_regular, shown
from minillm.text.safe import clean_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NAME = 1 << 16  # bytes of a metadata key or of a tensor's name
_MAX_TENSORS = 1 << 20
_MAX_STRING = 1 << 26  # bytes of a value; the longest are chat templates
_MAX_ELEMENTS = 1 << 24  # of an array; the longest are vocabularies and their merges


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape (slowest dimension first), ggml type number, and byte offset of the data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class Header:
    """The content of a file except the tensors' data. Each tensor's ``offset`` counts from the start of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read and validate the header. Raises WeightsError if the file is not a GGUF file, or its header is damaged."""
    try:
        with open_regular(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).header()
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise WeightsError(f"{path}: the file is empty") from None


def read_start(path: Path) -> dict[str, Any]:
    """Return the metadata at the start of a file that is still being downloaded. Later keys may be missing."""
    with open_regular(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _HeaderReader(path, data).start()


class _HeaderReader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 0

    def _error(self, reason: str) -> WeightsError:
        return WeightsError(f"{self._path}: not a usable GGUF file: {reason}")

    def start(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        with suppress(WeightsError):
            _, pair_count = self._counts()
            self._read_pairs(pair_count, metadata)
        return metadata

    def header(self) -> Header:
        tensor_count, pair_count = self._counts()
        # In the header, a tensor takes at least 24 bytes, and a pair of metadata key and value at least 13.
        self._check_count(tensor_count, 24, "tensors")
        self._check_count(pair_count, 13, "metadata pairs")
        if tensor_count > _MAX_TENSORS:
            raise self._error(f"{tensor_count} tensors are more than {_MAX_TENSORS}")
        metadata: dict[str, Any] = {}
        self._read_pairs(pair_count, metadata)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._error(f"general.alignment {shown(alignment)} is not a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise self._error(f"tensor {clean_line(info.name)!r} occurs twice")
            if info.offset % alignment or start + info.offset > self._size:
                raise self._error(f"tensor {clean_line(info.name)!r} lies at offset {info.offset}, outside the file")
            tensors[info.name] = replace(info, offset=start + info.offset)
        return Header(metadata, tensors)

    def _counts(self) -> tuple[int, int]:
        """Read the start of the header. Return the number of tensors and the number of metadata pairs."""
        if (magic := self._take(4)) != b"GGUF":
            raise self._error(f"it begins with {clean_line(repr(magic))}, not with 'GGUF'")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise self._error("it is big-endian, which is not supported")
        if version not in (2, 3):
            raise self._error(f"version {version} is not supported (2 and 3 are)")
        return self._number("Q"), self._number("Q")

    def _read_pairs(self, count: int, metadata: dict[str, Any]) -> None:
        for _ in range(count):
            key = self._string(_MAX_NAME)
            if key in metadata:
                raise self._error(f"the key {clean_line(key)!r} occurs twice")
            metadata[key] = self._value(self._number("I"), key)

    def _tensor_info(self) -> TensorInfo:
        name = self._string(_MAX_NAME)
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {clean_line(name)!r} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        # No type packs more than eight values into a byte.
        if not all(shape) or math.prod(shape) > 8 * self._size:
            raise self._error(f"tensor {clean_line(name)!r} of shape {shape} is larger than the file")
        return TensorInfo(name, shape, self._number("I"), self._number("Q"))

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind in (_STRING, _ARRAY):
            return self._string(_MAX_STRING) if kind == _STRING else self._array(key)
        raise self._error(f"the value of {clean_line(key)!r} has the unknown type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if count > _MAX_ELEMENTS:
            raise self._error(f"{count} elements of {clean_line(key)!r} do not fit into memory")
        if code := _SCALARS.get(kind):
            self._check_count(count, struct.calcsize(code), f"elements of {clean_line(key)!r}")
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))
        if kind == _STRING:
            self._check_count(count, 8, f"elements of {clean_line(key)!r}")
            return [self._string(_MAX_STRING) for _ in range(count)]
        raise self._error(f"{clean_line(key)!r} is an array of the unsupported type {kind}")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _string(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._error(f"a string of {length} bytes at offset {self._at}")
        return self._take(length).decode("utf-8", errors="replace")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._error(f"the file ends at byte {self._size}, within its header")
        chunk = self._data[self._at : self._at + count]
        self._at += count
        return chunk

    def _check_count(self, count: int, least_bytes: int, things: str) -> None:
        if count * least_bytes > self._size - self._at:
            raise self._error(f"{count} {things} do not fit into the file")
