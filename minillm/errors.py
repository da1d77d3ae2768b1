"""Errors that a user can cause or fix. Code that knows the cause raises them; commands and servers print them once.

Any other exception is a bug in minillm.
"""

import contextlib
import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

# The messages of torch's allocators, CUDA, its libraries and NCCL when memory runs out.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA\]?:? (driver error: |error: )?out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CU(BLAS|SPARSE|SOLVER|DNN)_STATUS_ALLOC_FAILED|Cuda failure \d* ?'out of memory'"
)


class MinillmError(Exception):
    """A failure with a message for the user: one line that names cause and fix."""

    exit_code = 1  # of the process


class UsageError(MinillmError):
    """A usage error: an unknown option or model, or a wrong parameter value."""

    exit_code = 2


class ContextLengthError(UsageError):
    """A prompt is too long for the context."""


class WeightsError(MinillmError):
    """A model's files are missing, damaged, unsafe or of a kind that is not supported."""


class DownloadError(MinillmError):
    """A model could not be downloaded because of the network, authorization, a checksum or disk space."""


class CapacityError(MinillmError):
    """A model does not fit into memory, or a request does not fit into the pool of blocks."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why the engine ended a request early. It has no traceback, which would keep the step's tensors in memory.

    Attributes:
        text: the message for the user, of one line.
        is_usage: whether the request's own parameters are the cause.
    """

    text: str
    is_usage: bool = False


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn out-of-memory errors of Python, torch and CUDA into CapacityError. Also works as a decorator."""
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
    """Convert an exception that ended a request to a MinillmError with a one-line message.

    For a bug, the message has the exception's type, text and source line.
    """
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
    """Return the one of ``words`` that is most similar to ``word``, for a suggestion; empty if none is similar.

    ``alike``: the minimum similarity, from 0 to 1.
    """
    close = difflib.get_close_matches(word, list(words), 1, alike)
    return close[0] if close else ""
