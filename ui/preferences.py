"""Save settings that the user changes in the chat, for the next start.

Sampling parameters, presets and the setting of ``/think`` are saved in ``chat.json``, the theme in the configuration.
"""

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm.checks import check_names, shown
from minillm.errors import MinillmError, UsageError
from minillm.params import BeamSearchParams, SamplingParams
from minillm.system import config_dir
from minillm.text.reading import read_bytes
from minillm.text.safe import cause, clean_line, parse_json
from minillm.ui.settings import CHAT_SAMPLING, Settings, normalized

_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[\w-]{1,40}")
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "precise": {"temperature": 0.0, "max_tokens": 1024},
    "balanced": dict(CHAT_SAMPLING),
    "creative": {"temperature": 1.0, "top_p": 0.98, "min_p": 0.05, "max_tokens": 1024},
}


@dataclass(frozen=True)
class Preferences:
    """The saved state of the chat.

    Attributes:
        sampling, beams: the parameters of SamplingParams and BeamSearchParams that were changed in the chat.
        presets: the user's own presets by name.
        thinks: the last setting of ``/think``; None if it was never used.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    beams: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thinks: bool | None = None

    def over(self, sampling: Mapping[str, Any], beams: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the configuration's parameters ``sampling`` and ``beams``, overridden by the saved parameters."""
        beams = {**beams, **self.beams}
        return {**sampling, **self.sampling}, {} if beams.get("beam_width") == 1 else beams

    def changed(self, before: Settings, after: Settings) -> "Preferences":
        """Return a copy that also contains the settings that the user has changed.

        These are the settings that differ between ``before`` and ``after``, with their values in ``after``.
        """
        sampling, beams = dict(self.sampling), dict(self.beams)
        for name in before.sampling.keys() | after.sampling.keys():
            if before.sampling.get(name) != after.sampling.get(name):
                sampling[name] = after.sampling.get(name, getattr(SamplingParams(), name))
        if before.beams != after.beams:
            beams = dict(after.beams) or {"beam_width": 1}
        thinks = self.thinks if before.thinks == after.thinks else after.thinks
        return replace(self, sampling=sampling, beams=beams, thinks=thinks)

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return the sampling parameters of a preset.

        Raises:
            UsageError: there is no preset with this name. The message lists all names.
        """
        known = {**BUILT_IN, **self.presets}
        if name not in known:
            raise UsageError(f"there is no preset {clean_line(name, 40)!r}; known: {', '.join(known)}")
        return known[name]

    def with_preset(self, name: str, sampling: Mapping[str, Any] | None) -> "Preferences":
        """Return a copy with a preset added or replaced. Without ``sampling``, the preset is deleted instead.

        Raises:
            UsageError: the name is invalid or built in, or there is no preset to delete.
        """
        if not _NAME.fullmatch(name):
            raise UsageError("a preset's name may have up to 40 letters, digits, _ and -")
        if name in BUILT_IN:
            raise UsageError(f"{name} is built in; choose another name")
        if sampling is None and name not in self.presets:
            raise UsageError(f"you have no preset {name!r}")
        others = {each: values for each, values in self.presets.items() if each != name}
        return replace(self, presets=others if sampling is None else {**others, name: dict(sampling)})


@dataclass(frozen=True)
class PreferencesFile:
    """Reads and writes the saved state, in ``chat.json``. Writes the theme to the user's configuration file."""

    file: Path
    config: Path

    @classmethod
    def of_user(cls, config: str | None = None) -> "PreferencesFile":
        """Return the paths of the user's files. ``config``: the configuration file named on the command line."""
        folder = config_dir()
        return cls(folder / "chat.json", folder / "config.toml" if config is None else Path(config).expanduser())

    def read(self) -> Preferences:
        """Return the saved state. It is empty if there is no file.

        Raises:
            UsageError: the file is invalid. The message says how to reset it.
        """
        try:
            data = parse_json(read_bytes(self.file, _MAX_BYTES))
            check_names(data, ["sampling", "beams", "presets", "thinks"], "entry")
            preferences = Preferences(**data)
            if not isinstance(preferences.thinks, bool | None):
                raise ValueError(f"thinks must be true or false, not {shown(preferences.thinks)}")
            presets = {name: normalized(values) for name, values in preferences.presets.items()}
            preferences = replace(preferences, sampling=normalized(preferences.sampling), presets=presets)
            BeamSearchParams(**preferences.beams)
        except FileNotFoundError:
            return Preferences()
        except (OSError, ValueError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(f"{self.file}: {cause(error)}; delete the file to reset it") from None
        return preferences

    def write(self, preferences: Preferences) -> None:
        """Save the state. The file is replaced atomically.

        Raises:
            MinillmError: the file cannot be written.
        """
        data: dict[str, Any] = {
            "sampling": dict(preferences.sampling),
            "beams": dict(preferences.beams),
            "presets": dict(preferences.presets),
        }
        if preferences.thinks is not None:
            data["thinks"] = preferences.thinks
        _replace(self.file, json.dumps(data, ensure_ascii=False, indent=1) + "\n")

    def write_theme(self, name: str) -> None:
        """Set the theme in the configuration file. All other lines stay.

        Raises:
            MinillmError: the file cannot be read or written.
        """
        try:
            text = self.config.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            text = ""
        except (OSError, ValueError) as error:
            raise MinillmError(f"{self.config} cannot be read: {cause(error)}") from None
        try:
            _replace(self.config, with_theme(text, name))
        except ValueError as error:
            raise MinillmError(f"{self.config}: {clean_line(str(error))}; write the theme yourself") from None


def with_theme(text: str, name: str) -> str:
    """Return the text of a configuration file with the theme ``name``.

    An existing line is changed. Otherwise a line is inserted before the first table, or at the top if a line before the
    table only looks like one.

    Raises:
        ValueError: the text is not TOML, or has the theme in another form than ``theme = "…"``.
    """
    wanted, lines = {**tomllib.loads(text), "theme": name}, text.splitlines(keepends=True)
    top = next((number for number, line in enumerate(lines) if re.match(r"\s*\[", line)), len(lines))
    said = re.compile(r"""(\s*theme\s*=\s*)("[^"]*"|'[^']*')(.*)""", re.DOTALL)
    ways = [
        [*lines[:number], f'{found.group(1)}"{name}"{found.group(3)}', *lines[number + 1 :]]
        for number, line in enumerate(lines)
        if (found := said.fullmatch(line))
    ]
    end = "" if not top or lines[top - 1].endswith("\n") else "\n"
    ways += [[*lines[:number], f'{end * (number > 0)}theme = "{name}"\n', *lines[number:]] for number in (top, 0)]
    for changed in map("".join, ways):
        with suppress(ValueError):
            if tomllib.loads(changed) == wanted:
                return changed
    raise ValueError('the theme is not in the form theme = "…"')


def _replace(path: Path, text: str) -> None:
    try:
        path = path.resolve()  # a symbolic link is kept
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".saving-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            if path.exists():
                shutil.copymode(path, name)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise MinillmError(f"{path} cannot be written: {error.strerror}") from None
