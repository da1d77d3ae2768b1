"""The settings of the chat: model, sampling or beam search, system prompt, theme."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from minillm.checks import declared
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.params import MAX_TOKENS, BeamSearchParams, SamplingParams
from minillm.ui.numbers import count
from minillm.user_config import CHAT_SAMPLING, UserConfig

# Without early stopping, finished answers on the screen could be replaced by longer ones for a long time.
CHAT_BEAMS: Mapping[str, Any] = {"early_stopping": True}
POOL_TOKENS = 32768
NUM_ALTERNATIVES = 5  # how many of the most probable tokens are requested at each position, for `ProbabilityScreen`
# Sampling parameters that also apply to beam search.
_SHARED = ("max_tokens", "max_reasoning_tokens", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Settings:
    """The settings of the chat.

    If ``beams`` has a ``beam_width`` above 1, answers come from beam search, else from sampling.

    Attributes:
        engine: options of EngineConfig.
        sampling, beams: parameters of SamplingParams and BeamSearchParams that differ from the defaults. If
            ``max_reasoning_tokens`` is set, ``max_tokens`` limits only the answer after the reasoning.
        depths: numbers of reasoning tokens in ascending order. For each number, one candidate answers after reasoning
            of this length. If ``depths`` is empty, there is one answer, or ``n`` answers.
    """

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(CHAT_SAMPLING))
    beams: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    theme: str = ""  # one of `THEMES`; empty: light or dark, like the terminal
    keymap: Mapping[str, Any] = field(default_factory=dict)  # action name -> keys, see `checked_keymap`
    thinks: bool | None = None  # see `minillm.service.messages.Generate`
    depths: tuple[int, ...] = ()
    bell: bool = True  # when a long answer ends, ring the bell and set the window's title

    @property
    def searches(self) -> bool:
        """Return whether answers come from beam search."""
        return int(self.beams.get("beam_width", 1)) > 1

    @property
    def num_candidates(self) -> int:
        """Return the number of answers to a question, sampled or by beam search."""
        if self.depths:
            return len(self.depths)
        return int(self.beams["beam_width"]) if self.searches else int(self.sampling.get("n", 1))

    def request_params(self) -> dict[str, Any]:
        """Return the parameters of a request.

        They are for BeamSearchParams if the answers come from beam search, otherwise for SamplingParams: see
        `searches`.
        """
        if self.depths:
            *shallow, deepest = self.depths
            return _answering({**self.sampling, "n": 1, "max_reasoning_tokens": deepest, "reasoning_depths": shallow})
        if self.searches:
            shared = {name: self.sampling[name] for name in _SHARED if name in self.sampling}
            return _answering({**CHAT_BEAMS, **shared, **self.beams})
        return _answering({"logprobs": NUM_ALTERNATIVES, **self.sampling})

    def params_to_continue(self) -> dict[str, Any]:
        """Return the parameters of a request that continues an answer.

        There is always one continuation, and it is sampled, even if the settings are for beam search or several
        answers.
        """
        return _answering({"logprobs": NUM_ALTERNATIVES, **self.sampling, "n": 1})


def _answering(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request, in which ``max_tokens`` limits reasoning and answer together.

    In the settings, ``max_tokens`` limits only the answer, so ``max_reasoning_tokens`` is added to it.
    """
    if limit := params.get("max_reasoning_tokens"):
        longest = params.get("max_tokens", SamplingParams.max_tokens)
        return {**params, "max_tokens": min(MAX_TOKENS, limit + longest)}
    return params


class Overlay(Protocol):
    """The interface of the chat's saved state, which `load_settings` merges with the configuration.

    ``over`` overrides parameters of the configuration. ``thinks`` is the last setting of ``/think``.
    """

    @property
    def thinks(self) -> bool | None: ...

    def over(self, sampling: Mapping[str, Any], beams: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]: ...


def load_settings(file: UserConfig, flags: Settings, kept: "Overlay | None" = None) -> Settings:
    """Merge the settings. The chat's saved state overrides the configuration file, and the command line overrides both.

    Args:
        file: the configuration file.
        flags: settings from the command line, including the model.
        kept: the chat's saved state.

    Raises:
        UsageError: a setting is invalid, or settings contradict each other.
    """
    sampling, beams = {**CHAT_SAMPLING, **file.sampling}, dict(file.beams)
    if kept is not None:
        sampling, beams = kept.over(sampling, beams)
    beams |= flags.beams
    if flags.beams:  # any option of beam search turns it on
        beams.setdefault("beam_width", BeamSearchParams.beam_width)
    settings = Settings(
        model=flags.model,
        engine=for_desktop({**file.engine, **flags.engine}),
        sampling={**sampling, **flags.sampling},
        beams=beams,
        system=flags.system or file.system,
        theme=flags.theme or file.theme,
        bell=file.bell,
        keymap=file.keymap,
        thinks=kept.thinks if kept is not None else None,
    )
    EngineConfig(**settings.engine)
    BeamSearchParams(**settings.beams)
    return replace(settings, sampling=normalized(settings.sampling))


def normalized(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of SamplingParams with its normalized values. Equal parameters then compare equal.

    A grammar stays as it is written, so that it can be saved.

    Raises:
        UsageError: a value is invalid.
    """
    params = SamplingParams(**sampling)
    return {name: value if name == "grammar" else getattr(params, name) for name, value in sampling.items()}


def for_desktop(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options ``engine``, with a limit for the size of the pool if none is set.

    The limit leaves memory for other programs.
    """
    if engine.keys() & {"pool_tokens", "num_blocks", "gpu_memory_utilization"}:
        return engine
    return {**engine, "pool_tokens": POOL_TOKENS}


@dataclass(frozen=True)
class ParamField:
    """One line of the sampling dialog.

    Attributes:
        kind: a function that parses the line's text.
        may_be_empty: whether None is a valid value. None is shown as an empty line.
    """

    name: str
    kind: Callable[[str], Any]
    hint: str
    may_be_empty: bool


def _fields(cls: type, *names: str) -> tuple[ParamField, ...]:
    """Return the sampling dialog's lines for the parameters ``names`` of the dataclass ``cls``.

    A line's hint is the first sentence of the parameter's help.
    """
    known = {
        name: ParamField(name, each.parse, each.help.split(" (")[0].split(". ")[0], default is None)
        for name, default, each in declared(cls)
    }
    return tuple(known[name] for name in names)


SAMPLING_FIELDS = _fields(
    SamplingParams, "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "seed", "stop", "n",
)  # fmt: skip
BEAM_FIELDS = _fields(BeamSearchParams, "beam_width", "length_penalty")


def field_texts(settings: Settings) -> dict[str, str]:
    """Return the text of each line of the sampling dialog, by the name of the parameter."""
    params = SamplingParams(**settings.sampling)
    shown: dict[str, Any] = {item.name: getattr(params, item.name) for item in SAMPLING_FIELDS}
    shown["stop"] = params.stop[0] if params.stop else None
    beams = {"beam_width": 1, "length_penalty": BeamSearchParams.length_penalty, **settings.beams}
    shown |= {item.name: beams[item.name] for item in BEAM_FIELDS}
    return {name: _text(value) for name, value in shown.items()}


def _text(value: Any) -> str:
    """Return a parameter as the dialog shows it: 1 instead of 1.0, and nothing instead of None."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def with_texts(settings: Settings, texts: Mapping[str, str]) -> Settings:
    """Return the settings with the values of the sampling dialog's lines. Parameters without a line stay.

    Raises:
        UsageError: a value is invalid.
    """
    sampling, beams = normalized(_read_fields(SAMPLING_FIELDS, texts, normalized(settings.sampling))), {}
    defaults = SamplingParams()
    sampling = {name: value for name, value in sampling.items() if value != getattr(defaults, name)}
    search = _read_fields(BEAM_FIELDS, texts, settings.beams)
    if search["beam_width"] != 1:  # else sample
        BeamSearchParams(**search)
        beams = search
    return replace(settings, sampling=sampling, beams=beams)


def with_param(settings: Settings, name: str, text: str) -> Settings:
    """Return the settings with one parameter changed.

    Raises:
        UsageError: there is no such parameter, or the value is invalid.
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
            values[item.name] = text.strip()
            with suppress(ValueError):  # keep the text: the parameters' own check rejects it with a reason
                values[item.name] = item.kind(text.strip())
        elif not item.may_be_empty:
            raise UsageError(f"{item.name} must be a number, not empty")
    return values


def settings_summary(settings: Settings) -> str:
    """Return the sampling or beam search settings in a few words for display."""
    if settings.depths:
        return f"depths {', '.join(map(count, settings.depths))}"
    if settings.searches:
        return f"{settings.beams['beam_width']} beams"
    params = SamplingParams(**settings.sampling)
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
    words += [f"think {params.max_reasoning_tokens}"] * (params.max_reasoning_tokens is not None)
    return " · ".join(words)
