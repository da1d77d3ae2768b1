"""The outputs of requests."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
_LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """Return a log-probability as a finite number for JSON: -infinity becomes -9999."""
    return max(_LEAST_LOGPROB, logprob)


@dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token's log-probability and the most probable tokens, best first, as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptTokenLogprobs(TokenLogprobs):
    """The log-probability of one token of a prompt.

    ``rank`` is 1 if it is the most probable of all tokens, and so on.
    """

    rank: int = 1


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``text`` is empty if the model has no tokenizer (dummy weights)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the completion
    score: float | None = None  # for beams: log-probability / length ** length_penalty
    reasoning_tokens: int = 0  # tokens between the tags around the model's reasoning, forced tokens excluded


@dataclass
class RequestMetrics:
    """Times of a request on the `time.monotonic` clock, in seconds. None: the request has not come so far."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_disk_tokens: int = 0  # prompt tokens with K and V from disk
    disk_seconds: float = 0.0  # the time for reading them

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """One request with all its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None  # why the request was rejected or failed
    prompt_logprobs: list[PromptTokenLogprobs | None] | None = (
        None  # one for each prompt token; None for the first, which has no earlier tokens
    )

    @property
    def text(self) -> str:
        """The text of the first completion; empty if there is no completion."""
        return self.outputs[0].text if self.outputs else ""

    def __repr__(self) -> str:
        texts = [output.text if len(output.text) <= 60 else f"{output.text[:59]}…" for output in self.outputs]
        state = "" if self.finished else ", unfinished"
        failed = "" if self.error is None else f", error={self.error!r}"
        return f"RequestOutput({self.request_id!r}, {len(self.prompt_token_ids)} prompt tokens, {texts}{state}{failed})"


@dataclass(slots=True)
class Delta:
    """The additions of one step to one completion. ``text`` never ends within a character or a stop string.

    In a beam search, ``replaces`` is True: the delta is the whole best beam so far, since the best beam may change.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """The work of one step, and the time it took. Swaps are counted in blocks."""

    number: int
    num_prefills: int  # chunks of prompts
    num_prefill_tokens: int
    num_decodes: int
    num_preempted: int  # groups
    num_swapped_out: int
    num_swapped_in: int
    seconds: float
    device_seconds: float  # launching work on the device and waiting for it; the rest is CPU work
    ended: float  # time of `time.monotonic`
