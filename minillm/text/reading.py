"""Files of strangers: only regular ones are opened, and only so much is read.

A pipe, a device or a directory in a model's place is named instead of waited for.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Any, BinaryIO

from minillm.errors import WeightsError
from minillm.text.safe import clean_line, parse_json

_MAX_BYTES = 64 << 20  # of a file that is read as a whole; the index of 400 billion parameters has 0.2 MB


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading in binary.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return path.open("rb")


def read_bytes(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """All of a file that has at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer.
    """
    with open_regular(path) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"the file has more than {limit:,} bytes", str(path))
    return data


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        WeightsError: there is no such file, or no JSON object in it.
    """
    try:
        value = parse_json(read_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path} is missing: a model directory has config.json, safetensors and tokenizer.json"
        ) from None
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise WeightsError(f"{path}: {clean_line(str(error))}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def is_there(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        WeightsError: its directory does not let us look.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    return True
