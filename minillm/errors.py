"""Errors that a user can cause or repair, each raised where the cause is known and printed once, at the edge.

Anything that is not a `MinillmError` is a defect of ours.
"""

import contextlib
import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import PurePath

# How torch's allocators say it, CUDA itself, its libraries, and NCCL.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA\]?:? (driver error: |error: )?out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CU(BLAS|SPARSE|SOLVER|DNN)_STATUS_ALLOC_FAILED|Cuda failure \d* ?'out of memory'"
)


class MinillmError(Exception):
    """A failure with a message for the user: one line, cause and fix."""

    exit_code = 1  # of the process


class UsageError(MinillmError):
    """A request makes no sense as it stands: an unknown flag, model or parameter value."""

    exit_code = 2


class ContextLengthError(UsageError):
    """A prompt is longer than the context."""


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
        found = _OUT_OF_MEMORY.search(text)
        if not isinstance(error, MemoryError) and not found:
            raise
        where = "this machine" if found is None or found[0].startswith("Default") else "the GPU"
        raise CapacityError(
            f"{where} has not enough memory; take a smaller model or form of it (`minillm fit` shows them), "
            "fewer blocks or fewer prompts"
        ) from None


def as_known(error: Exception) -> MinillmError:
    """Return the error of a request that an exception ends: a defect's is a line with its type, text and place."""
    try:
        with memory_errors():
            raise error
    except MinillmError as known:
        return known
    except Exception:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return MinillmError(f"internal error: {text} ({PurePath(place.filename).name}, line {place.lineno})")


def nearest(word: str, words: Iterable[str], alike: float = 0.5) -> str:
    """Return which of ``words`` was probably meant by one that is not among them; empty where none is near.

    ``alike``: the least likeness, from 0 to 1.
    """
    close = difflib.get_close_matches(word, list(words), 1, alike)
    return close[0] if close else ""
