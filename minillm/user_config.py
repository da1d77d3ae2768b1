"""The user's settings for all commands: ``config.toml`` in the configuration directory. Flags override settings.

model = "smollm2-360m"
system = "You are brief."    # the chat's system prompt
theme = "light"              # or "dark", or a theme of Textual, such as "nord"
bell = false                 # no bell and no window title when a long answer ends

[sampling]                   # the names are those of the flags of `minillm generate`
temperature = 0.6

[beams]                      # beam search instead of sampling
beam_width = 4

[engine]                     # the names are those of the flags of `minillm chat`
num_blocks = 2000

[keymap]                     # the chat's keys, by action; Ctrl+G in the chat lists the actions
edit = "ctrl+e"
copy = ["alt+y", "f12"]
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from minillm.checks import check_names, declared, shown
from minillm.config import EngineConfig
from minillm.errors import UsageError, nearest
from minillm.params import BeamSearchParams, SamplingParams, with_defaults
from minillm.system import config_dir, expanded
from minillm.text.reading import read_bytes
from minillm.text.safe import cause
from minillm.weights.manifest import default_model

THEMES = (
    "dark", "light", "nord", "gruvbox", "catppuccin-mocha", "dracula", "tokyo-night", "monokai", "flexoki",
    "catppuccin-latte", "catppuccin-frappe", "catppuccin-macchiato", "solarized-light", "solarized-dark", "rose-pine",
    "rose-pine-moon", "rose-pine-dawn", "atom-one-dark", "atom-one-light",
)  # of the chat  # fmt: skip
# Defaults of `generate` and the chat if neither the user nor the model sets sampling parameters.
CALM_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}
CHAT_SAMPLING: Mapping[str, Any] = {**CALM_SAMPLING, "max_tokens": 1024}
_MAX_BYTES = 1 << 20
_SAMPLING = {name for name, _, _ in declared(SamplingParams)}
_SEARCH = {name for name, _, _ in declared(BeamSearchParams)}
_ENGINE = {name for name, _, _ in declared(EngineConfig)}
_SHARED = (_SAMPLING & _SEARCH) - {"n"}  # the sampling parameters that also apply to beam search


@dataclass(frozen=True)
class UserConfig:
    """The settings in config.toml. Settings that the file does not have keep these defaults."""

    model: str = ""
    system: str = ""
    theme: str = ""
    bell: bool = True
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    beams: Mapping[str, Any] = field(default_factory=dict)
    keymap: Mapping[str, Any] = field(default_factory=dict)  # checked where the actions are known

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), {"": str, True: bool}.get(each.default, dict)
            if not isinstance(value, kind):
                wanted = {str: f"{each.name} must be a text", bool: f"{each.name} must be true or false"}
                raise UsageError(f"{wanted.get(kind, f'[{each.name}] must be a table')}, not {shown(value)}")
        if self.theme and self.theme not in THEMES:
            raise UsageError(f"theme must be one of {', '.join(THEMES)}, not {shown(self.theme)}")
        EngineConfig(**self.engine)
        SamplingParams(**self.sampling)
        BeamSearchParams(**self.beams)

    def choose_model(self, flag: str | None) -> str:
        """Return the first model named by: the flag, ``MINILLM_MODEL``, this file, the default in weights.toml."""
        return flag or os.environ.get("MINILLM_MODEL") or self.model or default_model()

    def request_values(self, given: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the parameters of a request, for beam search or for sampling. A beam search has a ``beam_width``.

        Args:
            given: the caller's parameters. A parameter that only one of the two methods has decides the method.
                Otherwise this file decides.
            defaults: the model's own defaults, which this file overrides.
        """
        values = with_defaults({**self.sampling, **given}, defaults)
        search, sample = set(given) & (_SEARCH - _SAMPLING), set(given) & (_SAMPLING - _SEARCH)
        if search or (int(self.beams.get("beam_width", 1)) > 1 and not sample):
            shared = {name: value for name, value in values.items() if name in _SHARED}
            return with_defaults({"beam_width": BeamSearchParams.beam_width, **self.beams, **given}, shared)
        return values


def read_config(file: str | None = None) -> UserConfig:
    """Read the settings in ``file``. None: the user's own config.toml, which need not exist.

    Raises:
        UsageError: the file is missing or not TOML, or has an unknown setting or a wrong value. The message says which.
    """
    path = config_dir() / "config.toml" if file is None else expanded(file, "--config")
    try:
        values = tomllib.loads(read_bytes(path, _MAX_BYTES).decode("utf-8-sig"))
        _check_settings(values)
        return UserConfig(**values)
    except FileNotFoundError:
        if file is not None:
            raise UsageError(f"there is no {path}") from None
        return UserConfig()
    except (OSError, ValueError, RecursionError) as error:  # no TOML, no UTF-8, nested without end
        raise UsageError(f"{path}: {cause(error)}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _check_settings(values: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown setting. The message suggests the most similar setting and names its table."""
    own = {each.name for each in fields(UserConfig)}
    tables = {"engine": _ENGINE, "beams": _SEARCH, "sampling": _SAMPLING}
    where = {name: f"{name} below [{table}]" for table, names in tables.items() for name in sorted(names)}
    for name in values:
        close = name if name in own else nearest(name, where | dict.fromkeys(own, ""))
        if close not in own and close:
            raise UsageError(f"unknown setting {shown(name)}; did you mean {where[close]}?")
    check_names(values, own, "setting")
    for table, names in tables.items():
        inside = values.get(table)
        for name in inside if isinstance(inside, dict) else ():
            if name not in names and name in where:
                raise UsageError(f"unknown parameter {shown(name)} below [{table}]; did you mean {where[name]}?")
