"""Errors that a user can cause or repair, each raised where the cause is known and printed once, at the edge.

Anything that is not a `MinillmError` is a defect of ours.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

# How torch's allocators begin to say it: of the CPU, of the GPU, and where CUDA itself has none.
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")


class MinillmError(Exception):
    """A failure with a message for the user: one line, cause and fix."""

    exit_code = 1  # of the process


class UsageError(MinillmError):
    """A request makes no sense as it stands: an unknown flag, model or parameter value."""

    exit_code = 2


class WeightsError(MinillmError):
    """A model's files are missing, damaged, unsafe or of a kind that is not supported."""


class DownloadError(MinillmError):
    """A model could not be fetched: network, authorisation, checksum or disk space."""


class CapacityError(MinillmError):
    """Something does not fit: a model into memory, or a request into the pool of blocks."""


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise CapacityError where Python, torch or CUDA says that memory has run out; also as a decorator."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(sign in text for sign in _OUT_OF_MEMORY):
            raise
        where = "the GPU" if "CUDA" in text else "this machine"
        raise CapacityError(
            f"{where} has not enough memory; take a smaller model, a shorter dtype, fewer blocks or fewer prompts"
        ) from None


def nearest(word: str, words: Iterable[str]) -> str:
    """Which of ``words`` was probably meant by one that is not among them; empty where none is near."""
    close = difflib.get_close_matches(word, list(words), 1, 0.5)
    return close[0] if close else ""
