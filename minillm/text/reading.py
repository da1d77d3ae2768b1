"""Read untrusted files: only regular files are opened, sizes are limited, and each value is checked.

A pipe, a device or a directory in place of a file raises an error, instead of blocking. An error about a value names
the file, the key and the value.
"""

from __future__ import annotations

import errno
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minillm.errors import WeightsError
from minillm.text.safe import cause, clean_line, parse_json

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_MAX_BYTES = 64 << 20  # maximum size of a file; the index of a model with 400 billion parameters has 0.2 MB


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading in binary. Raises OSError if it cannot be opened, or is not a regular file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    return path.open("rb")


def read_bytes(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """Read a whole file.

    Raises OSError if the file cannot be read, is not regular, or has more than ``limit`` bytes.
    """
    with open_regular(path) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"the file has more than {limit:,} bytes", str(path))
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises WeightsError if the file is missing or is not a JSON object."""
    try:
        value = parse_json(read_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        has = "a model directory has config.json, safetensors and tokenizer.json"
        raise WeightsError(f"{path} is missing: {has}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: {cause(error)}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def is_there(path: Path) -> bool:
    """Return whether the file exists. Raises WeightsError if its directory is not readable."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    return True


def shown(value: object) -> str:
    """Return a representation of ``value`` for messages, shortened and on one line."""
    return clean_line(_REPR.repr(value), 100)


@dataclass(frozen=True)
class Values:
    """Reads and checks the values of one JSON object, or of a file's metadata.

    Each method raises WeightsError if a value has another type or is out of range. A null value counts as absent, as in
    transformers.

    Attributes:
        where: the name of the file or object, for error messages.
    """

    where: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _found(self, key: str, default: Any) -> Any:
        return self.values[key] if self.has(key) else default

    def error(self, key: str, wanted: str) -> WeightsError:
        """Return the error for a key that is missing or has a wrong value. ``wanted`` describes the right values."""
        if not self.has(key):
            return WeightsError(f"{self.where}: the required key {key} is missing")
        return WeightsError(f"{self.where}: {key} must be {wanted}, not {shown(self.values[key])}")

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = 1e30) -> float:
        """Return a finite number from ``least`` to ``most``. Without ``default``, the key is required."""
        value = self._found(key, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.error(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def positive(self, key: str, default: float | None = None, *, most: float = 1e30) -> float:
        """Return a number above 0."""
        value = self.number(key, default, most=most)
        if value == 0:
            raise self.error(key, "above 0")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 1 << 62) -> int:
        """Return an integer from ``least`` to ``most``. Without ``default``, the key is required."""
        value = self._found(key, default)
        if type(value) not in (int, float) or not least <= value <= most or value != int(value):
            raise self.error(key, f"a whole number from {least} to {most}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._found(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._found(key, default)
        if not isinstance(value, str):
            raise self.error(key, "text")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return ``count`` finite numbers above 0. The key is required."""
        found: Any = self.values.get(key)
        fits = isinstance(found, list | tuple) and len(found) == count
        if not fits or not all(type(each) in (int, float) and 0 < each <= 1e30 for each in found):
            raise self.error(key, f"a list of {count} numbers above 0")
        return tuple(map(float, found))

    def part(self, key: str) -> Values:
        """Return the object at key ``key`` as `Values`. If the key is absent, it is an empty object."""
        value = self.values.get(key)
        if value is None:
            return Values(self.where, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Values(f"{self.where}: {key}", value)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return token ids as a tuple. The value is one token id or a list of token ids.

        Ids beyond the model's vocabulary are dropped, because the model never produces them.
        """
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in found):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(each for each in found if 0 <= each < vocab_size))
