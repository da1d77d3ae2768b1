"""Errors that a user can cause or repair, each raised where the cause is known and printed once, at the edge.

Anything that is not a `MinillmError` is a defect of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def nearest(word: str, words: Iterable[str]) -> str:
    """Which of ``words`` was probably meant by one that is not among them; empty where none is near."""
    close = difflib.get_close_matches(word, list(words), 1, 0.5)
    return close[0] if close else ""
