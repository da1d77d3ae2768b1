"""What is being generated: a sequence, and the group of sequences that answers one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.beams.search import BeamSearch
from minillm.cache import BlockTable
from minillm.outputs import CompletionOutput, FinishReason, RequestMetrics, TokenLogprobs
from minillm.params import Params
from minillm.text.stop import StopStringFilter

if TYPE_CHECKING:
    from minillm.text.detokenizer import StreamingDetokenizer


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, the block table that holds their K and V, and how many of them are computed."""

    seq_id: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    seed: int
    index: int = 0  # of the completion within its group
    num_computed: int = 0  # tokens whose K and V are in the cache, or will be after the steps under way
    num_pending: int = 0  # tokens that the device has drawn, or is about to, and that the host has not seen yet
    table: BlockTable | None = None  # None while the sequence holds no block
    text: list[str] = field(default_factory=list)
    detokenizer: StreamingDetokenizer | None = None
    stop_filter: StopStringFilter = field(default_factory=lambda: StopStringFilter(()))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """All tokens, those that only the device knows included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: admitted, preempted and resumed together.

    Until the prompt is computed only the first unfinished sequence holds blocks; then it is forked into the others.
    After a preemption by recompute the same happens again, and each sequence computes its own output tokens anew.

    Of a beam search the sequences are the running beams: they decode in step, for each step chooses among all of them.
    """

    request_id: str
    params: Params
    max_tokens: int  # params.max_tokens, or less where the context ends first
    sequences: list[Sequence]
    metrics: RequestMetrics
    seed: int
    prompt: str | None = None
    parent: Sequence | None = None  # an idle sequence whose beginning is shared when this group is admitted
    hold: bool = False  # keep the blocks of its completions when they end: they become idle
    forked: bool = False
    swapped: bool = False  # its blocks are on the host
    num_cached_tokens: int = 0
    end_ids: tuple[int, ...] = ()  # the tokens that end a completion
    salt: str | None = None  # only requests of the same salt share cached blocks
    # Of a beam search: its groups of beams, the beams of each, and whether deltas with text are wanted.
    searches: list[BeamSearch[CompletionOutput]] = field(default_factory=list)
    beams: list[list[Sequence]] = field(default_factory=list)
    streamed: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def num_seqs(self) -> int:
        """Sequences that hold blocks at a time, once the prompt is computed."""
        if self.searches:
            return self.params.num_sequences
        return self.params.num_sequences - sum(sequence.finished for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that hold blocks, or would if the group were admitted now."""
        if not self.forked:
            return self.unfinished[:1]
        return self.sequences if self.searches else self.unfinished

    def num_tokens_to_compute(self, sequence: Sequence) -> int:
        """Tokens whose K and V are still missing; before the fork, those of the prompt."""
        end = sequence.num_tokens if self.forked else self.num_prompt_tokens
        return end - sequence.num_computed

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether the tokens under way are the last ones that the sequence may have."""
        return sequence.num_tokens - sequence.num_prompt_tokens >= self.max_tokens
