"""Where files live: downloaded models, configuration, saved conversations."""

from __future__ import annotations

import os
from pathlib import Path

from minillm.errors import UsageError

_MAX_PATH = 4096  # bytes


def cache_dir() -> Path:
    """Downloaded models: ``$MINILLM_CACHE``, or the user's cache directory. May not exist yet."""
    return _directory("cache", "MINILLM_CACHE")


def config_dir() -> Path:
    """The configuration file: ``$MINILLM_CONFIG``, or the user's configuration directory."""
    return _directory("config", "MINILLM_CONFIG")


def data_dir() -> Path:
    """Conversations: ``$MINILLM_DATA``, or the user's data directory."""
    return _directory("data", "MINILLM_DATA")


def expanded(path: str, where: str) -> Path:
    """A path in which ~ is a home directory.

    Args:
        where: what named it, for the error.

    Raises:
        UsageError: it is no path, or there is no such home.
    """
    try:
        if "\0" in path or len(os.fsencode(path)) > _MAX_PATH:
            raise ValueError("this is no path")
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # ~nosuchuser
        raise UsageError(f"{where}: {path[:60]!r}: {error}") from None


def _directory(kind: str, variable: str) -> Path:
    if value := os.environ.get(variable):
        return expanded(value, variable)
    import platformdirs

    try:
        found = Path(getattr(platformdirs, f"user_{kind}_dir")("minillm", appauthor=False))
        if found.is_absolute():  # some versions raise, others leave ~ as it is
            return found
    except RuntimeError:
        pass
    raise UsageError(f"this user has no home directory; say with {variable} where the {kind} directory is")
