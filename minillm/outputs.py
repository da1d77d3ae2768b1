"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token's log-probability and the most probable tokens, best first, as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``text`` is empty where the model has no tokenizer (dummy weights)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    score: float | None = None  # of a beam: its log-probability over its length to the power of length_penalty


@dataclass
class RequestMetrics:
    """Moments on the `time.monotonic` clock, in seconds; None while they lie ahead."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """One request with all its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None  # why it was refused; its outputs are empty then


@dataclass(slots=True)
class Delta:
    """What one step added to one completion. ``text`` never holds half a character nor the start of a stop string.

    Of a beam search it is the best beam so far, whole: ``replaces`` is True, for another beam may be the best one now.
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
    """What one step did, and where its time went. Blocks for what was swapped and copied."""

    number: int
    num_prefills: int  # chunks of prompts
    num_prefill_tokens: int
    num_decodes: int
    num_preempted: int  # groups
    num_swapped_out: int
    num_swapped_in: int
    seconds: float
    device_seconds: float  # giving the device its work and waiting for it; the rest is the host's own
    ended: float  # on the clock of `time.monotonic`
