"""Where files live: downloaded models, configuration, saved conversations."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Downloaded models: ``$MINILLM_CACHE``, or the user's cache directory. May not exist yet."""
    return _directory("cache", "MINILLM_CACHE")


def config_dir() -> Path:
    """The configuration file: ``$MINILLM_CONFIG``, or the user's configuration directory."""
    return _directory("config", "MINILLM_CONFIG")


def data_dir() -> Path:
    """Conversations: ``$MINILLM_DATA``, or the user's data directory."""
    return _directory("data", "MINILLM_DATA")


def _directory(kind: str, variable: str) -> Path:
    if value := os.environ.get(variable):
        return Path(value).expanduser()
    import platformdirs

    return Path(getattr(platformdirs, f"user_{kind}_dir")("minillm", appauthor=False))
