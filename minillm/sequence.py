"""Sequences, the group of sequences that answers one request, and the chunks that a step computes."""

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
    """Tokens, the block table of their K and V, and how many of them are computed."""

    seq_id: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    index: int = 0  # of the completion within its group
    seed: int = 0
    num_computed: int = 0  # tokens with K and V in the cache, pending steps included
    num_pending: int = 0  # tokens drawn, or being drawn, that the CPU has not seen yet
    table: BlockTable | None = None  # None while it holds no block
    text: OutputText | None = None  # of the output; None without a tokenizer, or if text is only made at the end
    matcher: Matcher | None = None  # its state in the request's grammar, if there is one
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    decode: Chunk | None = None  # its last token as a chunk: one object, reused at every step

    @property
    def num_tokens(self) -> int:
        """All tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def own_table(self) -> BlockTable:
        """Its table; the sequence must have one."""
        assert self.table is not None, f"sequence {self.seq_id} runs without a block table"
        return self.table

    @property
    def blocks(self) -> list[int]:
        return self.own_table.blocks


class Stage(Enum):
    PROMPT = auto()  # the first unfinished sequence computes the prompt; the others will fork from it
    SPLIT = auto()  # every unfinished sequence has its own block table
    SAVED = auto()  # preempted, with its blocks in host memory


PROMPT = Stage.PROMPT  # read for each group at each step; looking a member up takes 0.1 us in Python 3.11


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: admitted, preempted and resumed together."""

    request_id: str
    params: Params
    method: Method
    max_tokens: int  # params.max_tokens, or less if the context ends first
    sequences: list[Sequence]
    metrics: RequestMetrics
    stage: Stage
    prompt: str | None = None
    parent: Sequence | None = None  # an idle sequence; its common beginning is shared at admission
    hold: bool = False  # keep completions' blocks when they end: the sequences become idle
    salt: str | None = None  # only requests with the same salt share cached blocks
    end_ids: tuple[int, ...] = ()  # tokens that end a completion
    bad_words: tuple[tuple[int, ...], ...] = ()  # banned runs of tokens
    allowed: NDArray[np.uint32] | None = None  # bit mask of the allowed tokens; None: all
    streamed: bool = False  # deltas need text at every step
    offline: bool = False  # see `minillm.engine.requests.Request`
    scores: PromptScores | None = None  # of the prompt, if the request wants any
    num_cached_tokens: int = 0
    error: str | None = None  # why it ends early
    state: Any = None  # owned by the method
    device: Any = None  # owned by the device runner

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
        """Sequences that hold blocks once the prompt is computed."""
        return self.params.num_sequences - sum(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that hold blocks, or would hold some if the group were admitted now."""
        return self.unfinished[:1] if self.stage is PROMPT else self.unfinished


@dataclass(slots=True, eq=False)
class Chunk:
    """``count`` tokens of one sequence, from ``sequence.num_computed`` on."""

    group: SequenceGroup
    sequence: Sequence
    count: int
    decodes: bool  # it is only its sequence's last token
    row: int = -1  # of the step's logits, if it computes its sequence's last token
    optional: int = 0  # further tokens, computed if the step has room left; once scheduled, as many as have room

    @classmethod
    def last_token(cls, group: SequenceGroup, sequence: Sequence) -> Chunk:
        """Return the last token of a sequence, if all others are computed."""
        sequence.decode = sequence.decode or cls(group, sequence, 1, True)
        return sequence.decode

    @property
    def token_ids(self) -> list[int]:
        """Its tokens, as far as the CPU knows them. Read before the step."""
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
    """A decoding method: how the sequences of a group continue. Engine and scheduler only know this protocol.

    If one of these raises an exception for a group, that group ends alone, with an error.
    """

    def begin(self, group: SequenceGroup) -> None:
        """Prepare a new group, which has one sequence."""

    def due(self, group: SequenceGroup) -> list[Chunk]:
        """Return all chunks of an admitted group that could be computed now."""

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        """Fork the group's sequences from ``leader``, which has computed the prompt."""

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        """Begin to decide how the sequences of these chunks continue.

        If it raises, nothing has been decided: the engine calls it again without the failing group.
        """

    def outputs(self, group: SequenceGroup) -> list[CompletionOutput]:
        """Return everything that a group has generated so far."""


class Flight(Protocol):
    """The pending decisions of one method in one step."""

    @property
    def may_run_ahead(self) -> bool:
        """Return whether the next step can be launched before the CPU knows these decisions."""

    @property
    def may_compute_ahead(self) -> bool:
        """Return whether the next step's logits can be computed earlier; its decisions wait for these."""

    @property
    def groups(self) -> list[SequenceGroup]:
        """Return the groups that it decides about, each once."""

    @property
    def is_wanted(self) -> bool:
        """Return whether any of its sequences is still running."""

    def wait(self) -> None:
        """Wait for the device."""

    def conclude(self) -> list[Delta]:
        """Apply the decisions to the sequences; return their additions."""

    def discard(self) -> None:
        """Discard the decisions."""
