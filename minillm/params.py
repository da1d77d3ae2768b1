"""The parameters of a request, declared and checked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minillm.checks import check_fields, check_integer, check_number, custom, documented, flag, integer, number, shown
from minillm.errors import UsageError
from minillm.grammar.grammar import Grammar, grammar_of

# Bounds that keep one request from starving the machine; each is far above the methods' needs.
MAX_N = 256
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 1 << 20  # token ids: more than any vocabulary has
MAX_TOKENS = 1 << 24
_MAX_LENGTH_PENALTY = 40.0  # MAX_TOKENS to this power is still a float


# (ids of the prompt, ids of the answer so far, float32 logits ``[vocab]``) -> logits ``[vocab]``
LogitsProcessor = Callable[[list[int], list[int], Any], Any]


def _stop_strings(name: str, stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence | set) or not all(isinstance(text, str) for text in strings):
        raise UsageError(f"{name} must be a string or a list of strings, not {shown(stop)}")
    if len(strings) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in strings):
        raise UsageError(f"{name} takes at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters")
    if not all(strings):
        raise UsageError(f"{name} must not contain an empty string")
    return tuple(strings)


def _token_ids(name: str, ids: Any, most: int = MAX_LOGIT_BIAS) -> tuple[int, ...]:
    ids = () if ids is None else ids
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping):
        raise UsageError(f"{name} must be a list of token ids, not {shown(ids)}")
    found = tuple(check_integer(name, token_id, 0, 1 << 31) for token_id in islice(ids, most + 1))
    if len(found) > most:
        raise UsageError(f"{name} takes at most {most:,} token ids")
    return found


def _allowed_token_ids(name: str, ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    found = _token_ids(name, ids, MAX_ALLOWED)
    if not found:
        raise UsageError(f"{name} must name at least one token id; leave it out to allow all")
    return found


def _depths(name: str, depths: Any) -> tuple[int, ...]:
    found = [check_integer(name, depth, 0, MAX_TOKENS) for depth in _token_ids(name, depths, MAX_N)]
    return tuple(sorted(set(found)))


def _logits_processor(name: str, function: Any) -> LogitsProcessor | None:
    if function is not None and not callable(function):
        raise UsageError(f"{name} must be a function of (prompt ids, output ids, logits), not {shown(function)}")
    return function


def _bad_words(name: str, words: Any) -> tuple[str | tuple[int, ...], ...]:
    words = (words,) if isinstance(words, str) else () if words is None else words
    if not isinstance(words, Sequence) or len(words) > MAX_LOGIT_BIAS:
        raise UsageError(f"{name} must be a list of at most {MAX_LOGIT_BIAS} texts or lists of ids, not {shown(words)}")
    found = tuple(word if isinstance(word, str) else _token_ids(name, word) for word in words)
    if not all(found):
        raise UsageError(f"{name} must not contain an empty text or list")
    return found


def _logit_bias(name: str, bias: Any) -> dict[int, float] | None:
    """Check a logit bias, and clamp its values to -100 … 100. Keys may be strings, as in JSON."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise UsageError(f"{name} must map at most {MAX_LOGIT_BIAS} token ids to numbers, not {shown(bias)}")
    result: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        value = check_number(name, value, float("-inf"), float("inf"))
        result[check_integer(f"{name} token id", token_id, 0, 1 << 31)] = float(min(100.0, max(-100.0, value)))
    return result or None


def _max_tokens(name: str, count: Any) -> int:
    return MAX_TOKENS if count is None else check_integer(name, count, 0, MAX_TOKENS)


def _top_k(name: str, k: Any) -> int:
    return max(0, check_integer(name, k, -1, 1 << 31))


def _logprobs(name: str, count: Any) -> int | None:
    return None if count is None else check_integer(name, count, -1, MAX_LOGPROBS)


def _early_stopping(name: str, value: Any) -> bool | str:
    if value not in (True, False, "never") or not isinstance(value, bool | str):
        raise UsageError(f"{name} must be true, false or 'never', not {shown(value)}")
    return value


def _true_false_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True, kw_only=True)
class _Params:
    """Hold the parameters that sampling and beam search share."""

    max_tokens: int = custom(
        256, _max_tokens, metavar="N", parse=int, help="longest answer in tokens. In Python, None: a full context"
    )
    min_tokens: int = integer(0, 0, MAX_TOKENS, help="do not end the answer before N tokens")
    stop: Sequence[str] = custom((), _stop_strings, repeats=True, help="stop before this text; repeatable")
    stop_token_ids: Iterable[int] = custom(
        (),
        _token_ids,
        metavar="ID",
        parse=int,
        repeats=True,
        help="stop at this token id, in addition to the model's own; repeatable",
    )
    ignore_eos: bool = flag(False, help="continue after end-of-sequence tokens")
    logprobs: int | None = custom(
        None, _logprobs, metavar="N", parse=int,
        help="report the log-probabilities of each generated token and the N most likely ones. They are taken before "
        "penalties and grammar; -1 reports all tokens",
    )  # fmt: skip
    prompt_logprobs: int | None = integer(
        None, 0, MAX_LOGPROBS,
        help="report the log-probability and rank of each prompt token, and the N most likely ones. The whole prompt "
        "is computed, because the prefix cache holds no logits",
    )  # fmt: skip
    repetition_penalty: float = number(
        1.0, 0.0, 100.0, above=True, help="above 1 makes all tokens so far less likely (Keskar et al. 2019)"
    )
    presence_penalty: float = number(0.0, -2.0, 2.0, help="lower the logits of tokens in the answer by this")
    frequency_penalty: float = number(0.0, -2.0, 2.0, help="lower a token's logit by this for each use in the answer")
    no_repeat_ngram_size: int = integer(
        0, 0, MAX_TOKENS, help="do not repeat any N tokens of the prompt and the answer (Paulus et al. 2017)"
    )
    logit_bias: Mapping[int, float] | None = custom(
        None, _logit_bias, cli=False, help="map of token ids to values added to their logits, -100 to 100"
    )
    bad_words: Sequence[str | Sequence[int]] = custom(
        (), _bad_words, repeats=True, help="never generate this text; repeatable. In Python, also a list of token ids"
    )
    allowed_token_ids: Iterable[int] | None = custom(
        None, _allowed_token_ids, metavar="ID", parse=int, repeats=True,
        help="generate only this token id; repeatable. Include an end token",
    )  # fmt: skip
    logits_processor: LogitsProcessor | None = custom(  # noqa: RUF009 - a field, as all others
        None, _logits_processor, cli=False,
        help="function of (prompt ids, answer ids, float32 logits [vocab] on the model's device) that returns the new "
        "logits. It runs after all other changes of the logits, and masked tokens stay masked; if it fails, only its "
        "request fails",
    )  # fmt: skip

    grammar: Grammar | None = custom(  # noqa: RUF009
        None, grammar_of, cli=False, help="constrain the answer: Grammar.json(schema), .regex, .choice or .lark"
    )

    max_reasoning_tokens: int | None = integer(
        None, 0, MAX_TOKENS,
        help="end the model's reasoning (<think>) after N tokens: a closing sentence and the end tag are forced, and "
        "the answer follows. They do not count; 0 answers at once. A grammar applies to the answer alone",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.max_tokens and self.prompt_logprobs is None:
            raise UsageError("max_tokens must be at least 1; 0 is for prompt_logprobs alone: a score without an answer")
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")

    @property
    def has_penalties(self) -> bool:
        """Return whether any penalty for repeated tokens is set."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0)


@documented
@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Params):
    """Hold the parameters of sampling, under their usual names.

    Temperature is applied first, then ``top_k``, ``top_p`` and ``min_p``. Each filter sees only the tokens that the
    previous filters left.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    n: int = integer(1, 1, MAX_N, help="answers per prompt, which share its blocks")
    temperature: float = number(1.0, 0.0, 1e6, help="sampling temperature; 0 is greedy")
    top_k: int = custom(0, _top_k, metavar="N", parse=int, help="keep the N most likely tokens; 0 keeps all")
    top_p: float = number(
        1.0, 0.0, 1.0, above=True, help="keep the top tokens up to this total probability (Holtzman et al. 2020)"
    )
    min_p: float = number(
        0.0, 0.0, 1.0, help="drop tokens below this fraction of the top token's probability (Nguyen et al. 2024)"
    )
    seed: int | None = integer(None, -(1 << 63), (1 << 63) - 1, help="random seed; the same seed gives the same tokens")
    reasoning_depths: Sequence[int] = custom(
        (), _depths, cli=False,
        help="answer also after these numbers of reasoning tokens, each below max_reasoning_tokens. The answers fork "
        "from one reasoning, and come in ascending order of depth; see LLM.depths",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reasoning_depths and not -1 < self.reasoning_depths[-1] < (self.max_reasoning_tokens or 0):
            raise UsageError("reasoning_depths must be below max_reasoning_tokens")
        if self.reasoning_depths and self.n > 1:
            raise UsageError("n must be 1 with reasoning_depths, which ask for an answer at each depth")
        if not self.max_tokens and self.reasoning_depths:
            raise UsageError("reasoning_depths need max_tokens of at least 1: with 0 there is no answer")
        if not self.max_tokens and self.n > 1:
            raise UsageError(f"n must be 1 where max_tokens is 0, not {self.n}: there is no answer")

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that the request computes at a time."""
        return self.n + len(self.reasoning_depths)


@documented
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(_Params):
    """Hold the parameters of beam search, with the semantics of Hugging Face ``generate``.

    Penalties and biases change the log-probabilities of a beam's next tokens. Penalties depend on the tokens of that
    beam. ``cumulative_logprob`` is the sum of the changed log-probabilities. A ``beam_width`` of 1 is not greedy
    decoding: if the best next token is an end token, the search continues with the second-best token.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    beam_width: int = integer(4, 1, MAX_N, help="beams kept at each step. Groups divide them evenly")
    n: int | None = integer(None, 1, MAX_N, help="answers to return, best first; None: all beams")
    length_penalty: float = number(
        1.0, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY,
        help="exponent of the length normalization (above 0 favors long beams)",
    )  # fmt: skip
    early_stopping: bool | str = custom(
        False, _early_stopping, metavar="true|false|never", parse=_true_false_or_text,
        choices=("true", "false", "never"),
        help="when to stop once beam_width beams have ended. true: at once; false: when no running beam can do better "
        "at its current length; never: when none can at any length",
    )  # fmt: skip
    num_beam_groups: int = integer(1, 1, MAX_N, help="groups of diverse beam search (Vijayakumar et al. 2018)")
    diversity_penalty: float = number(0.0, 0.0, 1e6, help="penalty for tokens already chosen by earlier groups")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.max_tokens:
            raise UsageError(
                "max_tokens must be at least 1 for beams; SamplingParams can score a prompt without an answer"
            )
        for name in ("n", "num_beam_groups"):
            count = getattr(self, name)
            if count is not None and count > self.beam_width:
                raise UsageError(f"{name} must be from 1 to {self.beam_width} (beam_width), not {count}")
        if self.beam_width % self.num_beam_groups:
            groups = f"num_beam_groups {self.num_beam_groups}"
            raise UsageError(f"beam_width {self.beam_width} is not a multiple of {groups}")

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that the request computes at a time."""
        return self.beam_width


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's parameters, completed with a model's ``defaults``.

    ``min_tokens`` may be larger than ``max_tokens`` if one of them is a default. A default ``min_tokens`` is then
    lowered to ``max_tokens``, and a default ``max_tokens`` is left out.
    """
    values = {**defaults, **given}
    most, least = values.get("max_tokens"), values.get("min_tokens")
    if isinstance(most, int) and isinstance(least, int) and least > most:
        if "min_tokens" not in given:
            values["min_tokens"] = most
        elif "max_tokens" not in given:
            del values["max_tokens"]
    return values


Params = SamplingParams | BeamSearchParams


def params_list(params: Params | Sequence[Params] | None, count: int, default: Callable[[], Params]) -> list[Params]:
    """Return a list with the parameters of each of ``count`` prompts.

    ``params`` is one set for all prompts, or a list with one set for each. For None, ``default`` is called. Raises
    UsageError if the list has another length than ``count``.
    """
    if params is None:
        return [default()] * count
    if isinstance(params, Params):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, Params) for each in params):
        raise UsageError("sampling parameters are a SamplingParams or BeamSearchParams, or a list of them")
    if len(params) != count:
        sets = f"{len(params)} sets of sampling parameters"
        raise UsageError(f"{sets} for {count} prompts; give one, or one for each")
    return list(params)
