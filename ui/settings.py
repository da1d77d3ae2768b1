"""The user's settings: the model, sampling or beam search, the system prompt, the theme.

They come from the command line and from ``config.toml`` in the user's configuration directory; flags win:

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError, nearest
from minillm.params import BeamSearchParams, SamplingParams
from minillm.paths import config_dir

# A chat wants calmer sampling and longer answers than the defaults of the API.
CHAT_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 1024}
NUM_ALTERNATIVES = 5  # most probable tokens that every answer brings, for the view of probabilities
# The sampling parameters that a beam search takes over.
_SHARED = ("max_tokens", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TABLES = ("engine", "sampling", "beams")
_TEXTS = ("model", "system", "theme")
_THEMES = ("dark", "light")


@dataclass(frozen=True)
class Settings:
    """``engine`` holds options of EngineConfig; ``sampling`` and ``beams`` those that differ from the defaults.

    With a ``beam_width`` above 1 in ``beams`` answers are searched for, else they are sampled.
    """

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(CHAT_SAMPLING))
    beams: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    theme: str = ""  # "dark", "light", or as the terminal says

    @property
    def searches(self) -> bool:
        return int(self.beams.get("beam_width", 1)) > 1

    @property
    def num_candidates(self) -> int:
        """The number of answers to a question."""
        return int(self.beams["beam_width"]) if self.searches else int(self.sampling.get("n", 1))

    def request_params(self) -> dict[str, Any]:
        """The parameters of a request: of BeamSearchParams where they have a ``beam_width``, else of SamplingParams."""
        if self.searches:
            return {**{name: self.sampling[name] for name in _SHARED if name in self.sampling}, **self.beams}
        return {"logprobs": NUM_ALTERNATIVES, **self.sampling}

    def params_to_continue(self) -> dict[str, Any]:
        """The parameters with which one answer goes on: a single sample, even where answers are searched for."""
        return {"logprobs": NUM_ALTERNATIVES, **self.sampling, "n": 1}


@dataclass(frozen=True)
class ParamField:
    """One line of the sampling screen. ``kind``: the type of its text; ``may_be_empty``: None is a value."""

    name: str
    kind: type[int] | type[float] | type[str]
    hint: str
    may_be_empty: bool = False


SAMPLING_FIELDS = (
    ParamField("temperature", float, "0 is greedy"),
    ParamField("top_k", int, "the k most probable; 0: all"),
    ParamField("top_p", float, "the most probable up to this"),
    ParamField("min_p", float, "at least this, beside the best"),
    ParamField("repetition_penalty", float, "above 1: repeat less"),
    ParamField("presence_penalty", float, "-2 to 2, once per token"),
    ParamField("frequency_penalty", float, "-2 to 2, per occurrence"),
    ParamField("max_tokens", int, "longest answer"),
    ParamField("seed", int, "same seed, same answer", may_be_empty=True),
    ParamField("stop", str, "end at this text", may_be_empty=True),
    ParamField("n", int, "answers to choose from"),
)
BEAM_FIELDS = (
    ParamField("beam_width", int, "above 1: beam search, no sampling"),
    ParamField("length_penalty", float, "above 0 favours long beams"),
)


def field_texts(settings: Settings) -> dict[str, str]:
    """The text of each field of the sampling screen."""
    params = SamplingParams.from_mapping(settings.sampling)
    shown: dict[str, Any] = {item.name: getattr(params, item.name) for item in SAMPLING_FIELDS}
    shown["stop"] = params.stop[0] if params.stop else None
    beams = {"beam_width": 1, "length_penalty": BeamSearchParams.length_penalty, **settings.beams}
    shown |= {item.name: beams[item.name] for item in BEAM_FIELDS}
    return {name: "" if value is None else f"{value:g}" if type(value) is float else str(value)
            for name, value in shown.items()}  # fmt: skip


def with_texts(settings: Settings, texts: Mapping[str, str]) -> Settings:
    """The settings that the texts of all fields ask for; parameters without a field stay.

    Raises:
        UsageError: a value that `SamplingParams` or `BeamSearchParams` refuses.
    """
    sampling, beams = _read_fields(SAMPLING_FIELDS, texts, settings.sampling), {}
    params, defaults = SamplingParams.from_mapping(sampling), SamplingParams()
    sampling = {name: getattr(params, name) for name in sampling if getattr(params, name) != getattr(defaults, name)}
    search = _read_fields(BEAM_FIELDS, texts, settings.beams)
    if search["beam_width"] != 1:  # else answers are sampled
        BeamSearchParams.from_mapping(search)
        beams = search
    return replace(settings, sampling=sampling, beams=beams)


def with_param(settings: Settings, name: str, text: str) -> Settings:
    """The settings with one parameter changed, by its name.

    Raises:
        UsageError: there is no such parameter, or it cannot have this value.
    """
    texts = field_texts(settings)
    if name not in texts:
        raise UsageError(f"unknown parameter {name!r}; known: {', '.join(texts)}")
    return with_texts(settings, {**texts, name: text})


def _read_fields(fields: Iterable[ParamField], texts: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in base.items() if name not in texts}
    for item in fields:
        text = texts[item.name]
        if item.kind is str:
            if text:
                values[item.name] = [text, *list(base.get(item.name, ()))[1:]]
        elif text.strip():
            values[item.name] = _number(item.kind, text.strip())
        elif not item.may_be_empty:
            raise UsageError(f"{item.name} must be a number, not empty")
    return values


def _number(kind: type, text: str) -> Any:
    """The number, or the text itself, which the parameters' own check refuses with a reason."""
    try:
        return kind(text)
    except ValueError:
        return text


def settings_summary(settings: Settings) -> str:
    """Sampling or beam search in a few words."""
    if settings.searches:
        return f"{settings.beams['beam_width']} beams"
    params = SamplingParams.from_mapping(settings.sampling)
    if params.temperature == 0:
        words = ["greedy"]
    else:
        words = [f"temp {params.temperature:g}"]
        words += [f"top-p {params.top_p:g}"] * (params.top_p < 1)
        words += [f"top-k {params.top_k}"] * (params.top_k > 0)
        words += [f"min-p {params.min_p:g}"] * (params.min_p > 0)
    words += [f"rep {params.repetition_penalty:g}"] * (params.repetition_penalty != 1)
    words += [f"seed {params.seed}"] * (params.seed is not None)
    words += [f"n {params.n}"] * (params.n > 1)
    return " · ".join(words)


# --- the configuration file -------------------------------------------------------------------------------------------


def config_path() -> Path:
    return config_dir() / "config.toml"


def load_settings(path: Path, default_model: str, flags: Settings, *, must_exist: bool = False) -> Settings:
    """The file's settings under those of the command line; without a file, only these.

    Args:
        flags: the settings of the command line; an empty model, system or theme is none.
        must_exist: a file that is not there is an error.

    Raises:
        UsageError: the file is no TOML, or says something that is not known; the message names the file.
    """
    if must_exist and not path.exists():
        raise UsageError(f"there is no {path}")
    data = _read(path)
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
    """Raise an error for an impossible value."""
    EngineConfig(**settings.engine)
    SamplingParams.from_mapping(settings.sampling)
    if settings.beams:
        BeamSearchParams.from_mapping(settings.beams)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    _known(path, data, (*_TEXTS, *_TABLES))
    for name in _TEXTS:
        if not isinstance(data.get(name, ""), str):
            raise UsageError(f"{path}: {name} must be a text, not {data[name]!r}")
    for name in _TABLES:
        if not isinstance(data.get(name, {}), dict):
            raise UsageError(f"{path}: [{name}] must be a table, not {data[name]!r}")
    if data.get("theme", "dark") not in _THEMES:
        raise UsageError(f"{path}: theme must be dark or light, not {data['theme']!r}")
    _known(path, data.get("engine", {}), tuple(EngineConfig.__dataclass_fields__))
    return data


def _known(path: Path, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in table:
        if name not in names:
            close = nearest(name, names)
            meant = f", did you mean {close}?" if close else f"; known: {', '.join(names)}"
            raise UsageError(f"{path}: unknown setting {name!r}{meant}")
