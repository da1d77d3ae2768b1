"""A sequence, the group of sequences that answers one request, and the part of them that a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minillm.cache import BlockTable, HostMoves
from minillm.grammar.matcher import Matcher
from minillm.outputs import (
    CompletionOutput,
    Delta,
    FinishReason,
    RequestMetrics,
    TokenLogprobs,
)
from minillm.params import Params
from minillm.prompt_scores import PromptScores
from minillm.text.stop import OutputText


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, the block table that holds their K and V, and how many of them are computed."""

    seq_id: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    index: int = 0  # of the completion within its group
    seed: int = 0
    num_computed: int = 0  # tokens whose K and V are in the cache, or will be after the steps under way
    num_pending: int = 0  # tokens that the device has drawn, or is about to, and that the host has not seen yet
    table: BlockTable | None = None  # None while the sequence holds no block
    text: OutputText | None = None  # of the output; None without a tokenizer, and where text is made at the end
    matcher: Matcher | None = None  # how far its output has come in the request's grammar, if it has one
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    decode: Chunk | None = None  # its last token as a chunk: the same object at every step, since making one takes time

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
    def own_table(self) -> BlockTable:
        """Its table, which it must have."""
        assert self.table is not None, f"sequence {self.seq_id} runs without a block table"
        return self.table

    @property
    def blocks(self) -> list[int]:
        return self.own_table.blocks


class Stage(Enum):
    PROMPT = auto()  # its first unfinished sequence computes the prompt; the others will fork from it
    SPLIT = auto()  # every unfinished sequence has a block table of its own
    SAVED = auto()  # preempted, and its blocks are on the host


PROMPT = Stage.PROMPT  # for each group at each step: Python 3.11 takes 0.1 us to look a member up


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: admitted, preempted and resumed together."""

    request_id: str
    params: Params
    method: Method
    max_tokens: int  # params.max_tokens, or less where the context ends first
    sequences: list[Sequence]
    metrics: RequestMetrics
    stage: Stage
    prompt: str | None = None
    parent: Sequence | None = None  # an idle sequence whose beginning is shared when this group is admitted
    hold: bool = False  # keep the blocks of its completions when they end: they become idle
    salt: str | None = None  # only requests of the same salt share cached blocks
    end_ids: tuple[int, ...] = ()  # the tokens that end a completion
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that must not be generated
    allowed: NDArray[np.uint32] | None = None  # bits of the only tokens that may be generated
    streamed: bool = False  # deltas with text are wanted even where they cost something
    scores: PromptScores | None = None  # of the prompt, if the request wants any
    num_cached_tokens: int = 0
    error: str | None = None  # the reason why it ends before its time
    state: Any = None  # the method's own
    device: Any = None  # the device runner's own

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_seqs(self) -> int:
        """Sequences that hold blocks at a time, once the prompt is computed."""
        return self.params.num_sequences - sum(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that hold blocks, or would if the group were admitted now."""
        return self.unfinished[:1] if self.stage is PROMPT else self.unfinished


@dataclass(slots=True, eq=False)
class Chunk:
    """``count`` tokens of one sequence, from ``sequence.num_computed`` on."""

    group: SequenceGroup
    sequence: Sequence
    count: int
    decodes: bool  # it is the last token of its sequence alone
    row: int = -1  # of the step's logits, if the chunk computes its sequence's last token
    optional: int = 0  # further tokens, computed if the step has room left; once scheduled, as many as have room

    @classmethod
    def last_token(cls, group: SequenceGroup, sequence: Sequence) -> Chunk:
        """The last token of a sequence whose other tokens are computed."""
        sequence.decode = sequence.decode or cls(group, sequence, 1, True)
        return sequence.decode

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the step computes, as far as the host knows them. Read before the step."""
        first = self.sequence.num_computed
        return self.sequence.token_ids[first : first + self.count]

    @property
    def num_logits(self) -> int:
        """Rows of logits: one if the chunk computes its sequence's last token. Read before the step."""
        return int(self.sequence.num_computed + self.count == self.sequence.num_tokens)


@dataclass(slots=True)
class Schedule:
    """One step: decoding sequences (one token each, their last), chunks of prompts, chunks with optional tokens."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    extended: list[Chunk] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    moves: HostMoves = field(default_factory=HostMoves)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills + self.extended


class Method(Protocol):
    """A way of decoding: how the sequences of a group go on. The engine and the scheduler know this door only.

    A group ends alone, with an error, where one of these raises an exception for it.
    """

    def begin(self, group: SequenceGroup) -> None:
        """Give a new group, which has one sequence, all that the method needs."""

    def due(self, group: SequenceGroup) -> list[Chunk]:
        """Everything of an admitted group that could be computed now."""

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        """Fork the group where its prompt, computed by ``leader``, is all that was missing."""

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        """Begin to decide how the sequences go on whose last tokens these chunks compute.

        If it raises, nothing has been decided: the engine asks again without the group that fails.
        """

    def outputs(self, group: SequenceGroup) -> list[CompletionOutput]:
        """Everything that a group has generated so far."""


class Flight(Protocol):
    """Decisions that one step and one method have under way."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step depends on nothing that this one has to tell the host."""

    @property
    def may_compute_ahead(self) -> bool:
        """Whether the next step's logits do not. Its decisions may wait until this one has been concluded."""

    @property
    def groups(self) -> list[SequenceGroup]:
        """The groups that are decided on, each once."""

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences has not ended meanwhile."""

    def wait(self) -> None:
        """Wait for the device."""

    def conclude(self) -> list[Delta]:
        """Let the sequences go on as was decided."""

    def discard(self) -> None:
        """Forget the decisions."""
