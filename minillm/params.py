"""How to decode: the parameters of a request, checked once, when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from minillm.errors import UsageError

# Bounds that keep one request from starving the machine; each is far above what the methods need.
MAX_N = 256
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_TOKENS = 1 << 24


class _HistoryParams:
    """What sampling and beam search have in common: changes of logits that depend on a sequence's own history."""

    logit_bias: Mapping[int, float] | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Parameters from JSON or a command line; unknown names are errors."""
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown parameter {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**values)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before pay for it."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0)


@dataclass(frozen=True)
class SamplingParams(_HistoryParams):
    """Parameters of sampling, under the names of the field.

    Attributes:
        n: completions per prompt; they share the prompt's blocks. 1 to 256.
        temperature: 0 is greedy. Applied first, then ``top_k``, ``top_p``, ``min_p``, each to what the last one left.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the fewest tokens whose probabilities reach ``top_p`` (Holtzman et al. 2020). In (0, 1].
        min_p: keep tokens at least ``min_p`` times as probable as the best one (Nguyen et al. 2024). In [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al.
            2019). 1 is off.
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from the logits of tokens in the
            output (OpenAI's definition). In [-2, 2].
        logit_bias: token id -> value added to its logit, in [-100, 100].
        seed: the same seed draws the same tokens whatever else runs; None takes one from the engine's own generator.
        stop: strings that end a completion; they are not part of its text.
        stop_token_ids: token ids that end a completion, besides the model's own end-of-sequence ids.
        min_tokens: no end before this many tokens.
        max_tokens: an end after this many tokens, or where the context is full.
        ignore_eos: go on past end-of-sequence tokens.
        no_repeat_ngram_size: no run of so many tokens occurs twice in prompt and output (Paulus et al. 2017). 0 is off.
        logprobs: report the chosen token's log-probability and those of this many most probable tokens; None reports
            nothing. They are the model's own, before penalties, temperature and truncation.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    logprobs: int | None = None
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        _check_integer("n", self.n, 1, MAX_N)
        _check_shared(self)
        _check_number("temperature", self.temperature, 0.0, 1e6)
        _check_integer("top_k", self.top_k, -1, 1 << 31)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        object.__setattr__(self, "top_k", max(self.top_k, 0))

    @property
    def num_sequences(self) -> int:
        """Sequences that the request computes at a time."""
        return self.n


@dataclass(frozen=True)
class BeamSearchParams(_HistoryParams):
    """Parameters of beam search, with the semantics of Hugging Face ``generate``.

    Attributes:
        beam_width: beams kept at each step, in all groups together. 1 to 256.
        n: completions returned, the best first; None returns ``beam_width`` of them.
        length_penalty: a finished beam's score is its log-probability divided by its length in generated tokens to
            this power: above 0 favours long ones.
        early_stopping: when to stop once ``beam_width`` beams have finished. True: at once. False: when the best
            running beam, at its present length, scores below the worst finished one. "never": when no running beam
            could still score above it at any length.
        num_beam_groups, diversity_penalty: the beams in groups of equal width, each of which pays the penalty for every
            time that an earlier group has chosen a token at the same step (Vijayakumar et al. 2018).
        logprobs: as in SamplingParams; ``cumulative_logprob`` is what the search has added up, penalties included.
        others: as in SamplingParams; each is applied to the log-probabilities of each beam by its own history.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    beam_width: int = 4
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, 1, MAX_N)
        if self.n is not None:
            _check_integer("n", self.n, 1, self.beam_width)
        _check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never") or isinstance(self.early_stopping, int) != isinstance(
            self.early_stopping, bool
        ):
            raise UsageError(f"early_stopping must be true, false or 'never', not {self.early_stopping!r}")
        _check_integer("num_beam_groups", self.num_beam_groups, 1, self.beam_width)
        if self.beam_width % self.num_beam_groups:
            raise UsageError(f"beam_width {self.beam_width} is no multiple of num_beam_groups {self.num_beam_groups}")
        _check_number("diversity_penalty", self.diversity_penalty, 0.0, 1e6)
        _check_shared(self)

    @property
    def num_sequences(self) -> int:
        """Sequences that the request computes at a time."""
        return self.beam_width

    @property
    def seed(self) -> None:
        """Beam search draws nothing."""
        return None


Params = SamplingParams | BeamSearchParams


def _check_shared(params: Params) -> None:
    """Check what both kinds have, and bring it into one form."""
    _check_number("repetition_penalty", params.repetition_penalty, 0.0, 100.0, above=True)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_integer("no_repeat_ngram_size", params.no_repeat_ngram_size, 0, MAX_TOKENS)
    _check_integer("min_tokens", params.min_tokens, 0, MAX_TOKENS)
    _check_integer("max_tokens", params.max_tokens, 1, MAX_TOKENS)
    if params.min_tokens > params.max_tokens:
        raise UsageError(f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}")
    if not isinstance(params.ignore_eos, bool):
        raise UsageError(f"ignore_eos must be true or false, not {params.ignore_eos!r}")
    if params.logprobs is not None:
        _check_integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    object.__setattr__(params, "stop", _stop_strings(params.stop))
    object.__setattr__(params, "stop_token_ids", _token_ids("stop_token_ids", params.stop_token_ids))
    object.__setattr__(params, "logit_bias", _logit_bias(params.logit_bias))


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {value}")


def _check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """``above`` excludes the lower bound. NaN fails every comparison, so it is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high or (above and value == low) or math.isnan(value):
        least = f"above {low:g}" if above else f"at least {low:g}"
        raise UsageError(f"{name} must be {least} and at most {high:g}, not {value:g}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise UsageError(f"stop must be a string or a list of strings, not {stop!r}")
    if len(strings) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in strings):
        raise UsageError(f"stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters")
    if not all(strings):
        raise UsageError("stop must not contain an empty string")
    return tuple(strings)


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str) or len(ids) > MAX_LOGIT_BIAS:
        raise UsageError(f"{name} must be a list of at most {MAX_LOGIT_BIAS} token ids, not {ids!r}")
    for token_id in ids:
        _check_integer(name, token_id, 0, 1 << 31)
    return tuple(ids)


def _logit_bias(bias: object) -> dict[int, float] | None:
    """Keys may be strings, as JSON has them."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise UsageError(f"logit_bias must map at most {MAX_LOGIT_BIAS} token ids to numbers, not {bias!r}")
    result: dict[int, float] = {}
    for key, value in bias.items():
        if isinstance(key, str) and key.isdecimal():
            key = int(key)
        _check_integer("logit_bias token id", key, 0, 1 << 31)
        _check_number("logit_bias", value, -100.0, 100.0)
        result[key] = float(value)
    return result or None
