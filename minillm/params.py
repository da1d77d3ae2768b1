"""The parameters of a request, checked once, when they are made."""

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


def _logits_processor(name: str, function: Any) -> LogitsProcessor | None:
    if function is not None and not callable(function):
        raise UsageError(f"{name} must be a function of (prompt ids, output ids, logits), not {shown(function)}")
    return function


def _bad_words(name: str, words: Any) -> tuple[str | tuple[int, ...], ...]:
    words = (words,) if isinstance(words, str) else () if words is None else words
    if not isinstance(words, Sequence) or len(words) > MAX_LOGIT_BIAS:
        raise UsageError(f"{name} must be a list of at most {MAX_LOGIT_BIAS} texts or lists of ids, not {shown(words)}")
    if not all(words):
        raise UsageError(f"{name} must not contain an empty text or list")
    return tuple(word if isinstance(word, str) else _token_ids(name, word) for word in words)


def _logit_bias(name: str, bias: Any) -> dict[int, float] | None:
    """Check a bias, whose keys may be strings as in JSON, and cut its values to -100 … 100."""
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
    """Parameters of sampling and of beam search."""

    max_tokens: int = custom(
        256, _max_tokens, metavar="N", parse=int, help="longest answer in tokens; None: a full context"
    )
    min_tokens: int = integer(0, 0, MAX_TOKENS, help="no end before N tokens")
    stop: Sequence[str] = custom((), _stop_strings, repeats=True, help="end before this text; may be several")
    stop_token_ids: Iterable[int] = custom(
        (),
        _token_ids,
        metavar="ID",
        parse=int,
        repeats=True,
        help="end at this token id, as well as at the model's own",
    )
    ignore_eos: bool = flag(False, help="go on past end-of-sequence tokens")
    logprobs: int | None = custom(
        None, _logprobs, metavar="N", parse=int,
        help="report the log-probabilities of the chosen token and the N most probable ones, before penalties and "
        "grammar; -1: all",
    )  # fmt: skip
    prompt_logprobs: int | None = integer(
        None, 0, MAX_LOGPROBS,
        help="report log-probability and rank of each token of the prompt, and the N most probable ones; it is "
        "computed whole, since the prefix cache keeps no logits, and leaves its blocks there",
    )  # fmt: skip
    repetition_penalty: float = number(
        1.0, 0.0, 100.0, above=True, help="above 1 makes the tokens so far less likely (Keskar et al. 2019)"
    )
    presence_penalty: float = number(0.0, -2.0, 2.0, help="lowers a logit at the first use of its token")
    frequency_penalty: float = number(0.0, -2.0, 2.0, help="lowers a logit at every use of its token")
    no_repeat_ngram_size: int = integer(
        0, 0, MAX_TOKENS, help="no run of N tokens twice in prompt and answer (Paulus et al. 2017); 0: off"
    )
    logit_bias: Mapping[int, float] | None = custom(
        None, _logit_bias, cli=False, help="token id to value added to its logit, -100 to 100"
    )
    bad_words: Sequence[str | Sequence[int]] = custom(
        (), _bad_words, repeats=True, help="never say this text, or this run of token ids; may be several"
    )
    allowed_token_ids: Iterable[int] | None = custom(
        None, _allowed_token_ids, metavar="ID", parse=int, repeats=True,
        help="say these token ids only, so name an end token, too; may be several",
    )  # fmt: skip
    logits_processor: LogitsProcessor | None = custom(  # noqa: RUF009 - a field, as all others
        None, _logits_processor, cli=False,
        help="your function of (prompt ids, answer's ids, float32 logits [vocab] where the model computes): it returns "
        "the logits to go on with, after every other change of them; what must not follow stays out; if it fails, its "
        "request fails alone",
    )  # fmt: skip

    grammar: Grammar | None = custom(  # noqa: RUF009
        None, grammar_of, cli=False, help="what the answer must look like: Grammar.json(schema), .regex, .choice, .lark"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.max_tokens and self.prompt_logprobs is None:
            raise UsageError("max_tokens must be at least 1; 0 is for prompt_logprobs alone: a score without an answer")
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before pay for it."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0)


@documented
@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Params):
    """Parameters of sampling, under the names of the field.

    Temperature comes first, then ``top_k``, ``top_p`` and ``min_p``, each on the tokens that the one before has left.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    n: int = integer(1, 1, MAX_N, help="answers for each prompt; they share its blocks")
    temperature: float = number(1.0, 0.0, 1e6, help="0 is greedy")
    top_k: int = custom(0, _top_k, metavar="N", parse=int, help="keep the N most probable tokens; 0: all")
    top_p: float = number(
        1.0, 0.0, 1.0, above=True, help="keep the most probable tokens up to this sum (Holtzman et al. 2020)"
    )
    min_p: float = number(0.0, 0.0, 1.0, help="keep tokens this probable beside the best one (Nguyen et al. 2024)")
    seed: int | None = integer(None, -(1 << 63), (1 << 63) - 1, help="the same seed gives the same tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.max_tokens and self.n > 1:
            raise UsageError(f"n must be 1 where max_tokens is 0, not {self.n}: there is no answer")

    @property
    def num_sequences(self) -> int:
        """Sequences that the request computes at a time."""
        return self.n


@documented
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(_Params):
    """Parameters of beam search, with the semantics of Hugging Face ``generate``.

    Penalties and biases act on the log-probabilities of each beam, by its own history; ``cumulative_logprob`` adds them
    up. A ``beam_width`` of 1 is a search with one beam, not greedy decoding: past an end token it goes on with the
    second-best one.

    Raises:
        UsageError: a value of the wrong type or out of range.
    """

    beam_width: int = integer(4, 1, MAX_N, help="beams kept at each step, in all groups together")
    n: int | None = integer(None, 1, MAX_N, help="answers returned, the best first; None: all beams")
    length_penalty: float = number(
        1.0, -100.0, 100.0, help="power of the length that divides a beam's score (above 0 favours long beams)"
    )
    early_stopping: bool | str = custom(
        False, _early_stopping, metavar="{true,false,never}", parse=_true_false_or_text,
        help="once beam_width beams have ended, stop at once (true), when no running beam can do better at its present "
        "length (false), or at any length (never)",
    )  # fmt: skip
    num_beam_groups: int = integer(1, 1, MAX_N, help="diverse beam search in N groups (Vijayakumar et al. 2018)")
    diversity_penalty: float = number(0.0, 0.0, 1e6, help="taken from a token for each earlier group that chose it")

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
            raise UsageError(f"beam_width {self.beam_width} is no multiple of num_beam_groups {self.num_beam_groups}")

    @property
    def num_sequences(self) -> int:
        """Sequences that the request computes at a time."""
        return self.beam_width


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's parameters, and a model's ``defaults`` where it gives none.

    A default of ``min_tokens`` or ``max_tokens`` that contradicts the request's other one gives way.
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
