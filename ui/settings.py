"""What the user can change: the model, how it samples, and the system prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.decoding.params import SamplingParams
from minillm.errors import UsageError

# A chat wants calmer sampling and longer answers than the defaults of the API.
CHAT_SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 1024}


@dataclass(frozen=True)
class Settings:
    """``engine`` holds options of EngineConfig, ``sampling`` those of SamplingParams that differ from its defaults."""

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(CHAT_SAMPLING))
    system: str = ""


@dataclass(frozen=True)
class SamplingField:
    """One line of the sampling screen. ``kind`` is what its text is read as."""

    name: str
    kind: type[int] | type[float] | type[str]
    hint: str


SAMPLING_FIELDS = (
    SamplingField("temperature", float, "0 is greedy"),
    SamplingField("top_k", int, "the k most probable; 0: all"),
    SamplingField("top_p", float, "the most probable up to this"),
    SamplingField("min_p", float, "at least this, beside the best"),
    SamplingField("repetition_penalty", float, "above 1: repeat less"),
    SamplingField("presence_penalty", float, "-2 to 2, once per token"),
    SamplingField("frequency_penalty", float, "-2 to 2, per occurrence"),
    SamplingField("max_tokens", int, "longest answer"),
    SamplingField("seed", int, "same seed, same answer"),
    SamplingField("stop", str, "end at this text"),
)


def sampling_text(sampling: Mapping[str, Any]) -> dict[str, str]:
    """What the sampling screen shows for each field."""
    params = SamplingParams.from_mapping(sampling)
    shown = {item.name: getattr(params, item.name) for item in SAMPLING_FIELDS}
    shown["stop"] = params.stop[0] if params.stop else None
    return {name: "" if value is None else f"{value:g}" if type(value) is float else str(value)
            for name, value in shown.items()}  # fmt: skip


def read_sampling(texts: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that ``texts`` asks for; those without a field are taken from ``base``.

    Raises:
        UsageError: a value that `SamplingParams` refuses.
    """
    sampling = {name: value for name, value in base.items() if name not in texts}
    for item in SAMPLING_FIELDS:
        text = texts.get(item.name, "")
        if item.kind is str:
            if text:
                sampling[item.name] = [text, *list(base.get("stop", ()))[1:]]
        elif text.strip():
            sampling[item.name] = _number(item.kind, text.strip())
        elif item.name != "seed":
            raise UsageError(f"{item.name} must be a number, not empty")
    params = SamplingParams.from_mapping(sampling)
    defaults = SamplingParams()
    return {name: getattr(params, name) for name in sampling if getattr(params, name) != getattr(defaults, name)}


def _number(kind: type, text: str) -> Any:
    """The number, or the text itself: SamplingParams says what is wrong with it."""
    try:
        return kind(text)
    except ValueError:
        return text


def sampling_summary(sampling: Mapping[str, Any]) -> str:
    """In a few words: what differs from plain sampling."""
    params = SamplingParams.from_mapping(sampling)
    if params.temperature == 0:
        words = ["greedy"]
    else:
        words = [f"temp {params.temperature:g}"]
        words += [f"top-p {params.top_p:g}"] * (params.top_p < 1)
        words += [f"top-k {params.top_k}"] * (params.top_k > 0)
        words += [f"min-p {params.min_p:g}"] * (params.min_p > 0)
    words += [f"rep {params.repetition_penalty:g}"] * (params.repetition_penalty != 1)
    words += [f"seed {params.seed}"] * (params.seed is not None)
    return " · ".join(words)
