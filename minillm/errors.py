"""Errors that a user can cause or repair.

Each is raised where the cause is known, with one line that names the cause and the fix, and is printed once, at the
edge (``cli.main``, the chat app). ``exit_code`` is what the process ends with. Anything that is not a `MinillmError` is
a defect of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MinillmError(Exception):
    """A failure with a message for the user: one line, cause and fix. Exit code 1."""

    exit_code = 1


class UsageError(MinillmError):
    """What was asked for makes no sense as asked: an unknown flag, model or parameter value. Exit code 2."""

    exit_code = 2


class WeightsError(MinillmError):
    """A model's files are missing, damaged, unsafe or of a kind that is not supported."""


class DownloadError(MinillmError):
    """A model could not be fetched: network, authorisation, checksum or disk space."""


class CapacityError(MinillmError):
    """Something does not fit: a model into memory, or a request into the pool of blocks."""


def nearest(word: str, words: Iterable[str]) -> str:
    """Which of ``words`` was probably meant by one that is not among them; empty where none is near."""
    close = difflib.get_close_matches(word, list(words), 1, 0.5)
    return close[0] if close else ""
