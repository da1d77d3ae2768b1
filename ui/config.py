"""The configuration file: ``config.toml`` in the user's configuration directory. Flags win over it.

model = "smollm2-360m"
system = "You are brief."
theme = "light"          # or "dark"

[sampling]               # as in the sampling screen (F3)
temperature = 0.6
n = 2

[beams]                  # beam search instead of sampling
beam_width = 4

[engine]                 # as the flags of `minillm chat`
num_blocks = 2000
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.checks import shown
from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError, nearest
from minillm.params import BeamSearchParams, SamplingParams
from minillm.paths import config_dir
from minillm.text.reading import read_bytes
from minillm.ui.settings import CHAT_SAMPLING, Settings

_TABLES = ("engine", "sampling", "beams")
_TEXTS = ("model", "system", "theme")
_THEMES = ("dark", "light")
_MAX_BYTES = 1 << 20


def config_path() -> Path:
    return config_dir() / "config.toml"


def load_settings(path: Path, default_model: str, flags: Settings, *, must_exist: bool = False) -> Settings:
    """The file's settings under those of the command line; without a file, only these.

    Args:
        flags: what the command line says; an empty model, system or theme is none.
        must_exist: a file that is not there is an error.

    Raises:
        UsageError: the file is no TOML, or says something that is not known; the message names the file.
    """
    data = _read(path, must_exist)
    settings = Settings(
        model=flags.model or data.get("model") or default_model,
        engine={**data.get("engine", {}), **flags.engine},
        sampling={**CHAT_SAMPLING, **data.get("sampling", {}), **flags.sampling},
        beams={**data.get("beams", {}), **flags.beams},
        system=flags.system or data.get("system", ""),
        theme=flags.theme or data.get("theme", ""),
    )
    try:
        _check(settings)
    except (MinillmError, TypeError, ValueError) as error:
        raise UsageError(f"{error} (in {path}, or on the command line)" if data else str(error)) from None
    return settings


def _check(settings: Settings) -> None:
    """Raise unless the values are possible ones."""
    EngineConfig(**settings.engine)
    SamplingParams.from_mapping(settings.sampling)
    if settings.beams:
        BeamSearchParams.from_mapping(settings.beams)


def _read(path: Path, must_exist: bool) -> dict[str, Any]:
    try:
        data = tomllib.loads(read_bytes(path, _MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise UsageError(f"there is no {path}") from None
        return {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, an endless number, nested without end
        raise UsageError(f"{path}: {error}") from None
    _known(path, data, (*_TEXTS, *_TABLES))
    for name in _TEXTS:
        if not isinstance(data.get(name, ""), str):
            raise UsageError(f"{path}: {name} must be a text, not {shown(data[name])}")
    for name in _TABLES:
        if not isinstance(data.get(name, {}), dict):
            raise UsageError(f"{path}: [{name}] must be a table, not {shown(data[name])}")
    if data.get("theme", "dark") not in _THEMES:
        raise UsageError(f"{path}: theme must be dark or light, not {shown(data['theme'])}")
    _known(path, data.get("engine", {}), tuple(EngineConfig.__dataclass_fields__))
    return data


def _known(path: Path, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in table:
        if name not in names:
            close = nearest(name, names)
            meant = f", did you mean {close}?" if close else f"; known: {', '.join(names)}"
            raise UsageError(f"{path}: unknown setting {name!r}{meant}")
