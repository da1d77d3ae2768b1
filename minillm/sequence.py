"""Sequences, the group of sequences that answers one request, and the chunks that a step computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minillm.cache import BlockTable, HostMoves
from minillm.errors import RequestError
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
from minillm.text.reasoning_budget import ReasoningPosition
from minillm.text.stop import OutputText


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one completion (prompt and output), and the block table with the K and V computed so far."""

    seq_id: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    index: int = 0  # of the completion within its group
    seed: int = 0
    num_computed: int = 0  # tokens with K and V in the cache, pending steps included
    num_pending: int = 0  # tokens that the device draws and the CPU has not seen yet
    table: BlockTable | None = None  # None while it holds no block
    text: OutputText | None = None  # the output's text; None without a tokenizer, or if it is only made at the end
    matcher: Matcher | None = None  # the sequence's state in the request's grammar, if there is one
    reasoning_position: ReasoningPosition | None = None  # None without a limit on the reasoning
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    decode: Chunk | None = None  # a chunk of the last token: one object, reused at every step

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including pending tokens, which the device draws and the CPU has not seen yet."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def reasons_with(self, token_id: int) -> bool:
        """Return whether ``token_id``, as the sequence's next token, belongs to its reasoning, not to its answer."""
        return self.reasoning_position is not None and self.reasoning_position.covers(self.token_ids, token_id)

    @property
    def own_table(self) -> BlockTable:
        """The block table. Raises AssertionError if the sequence holds no blocks."""
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
    parent: Sequence | None = None  # an idle sequence; at admission, blocks of equal first tokens are shared
    hold: bool = False  # keep completions' blocks when they end: the sequences become idle
    pin: bool = False  # see `minillm.engine.requests.Request`
    salt: str | None = None  # only requests with the same salt share cached blocks
    end_ids: tuple[int, ...] = ()  # tokens that end a completion
    bad_words: tuple[tuple[int, ...], ...] = ()  # banned runs of tokens
    allowed: NDArray[np.uint32] | None = None  # bit mask of the allowed tokens; None: all
    streamed: bool = False  # deltas need text at every step
    offline: bool = False  # see `minillm.engine.requests.Request`
    owner: str | None = None  # see `minillm.engine.requests.Request`
    in_reasoning: bool = False  # see `minillm.engine.requests.Request`
    scores: PromptScores | None = None  # of the prompt, if the request wants any
    num_cached_tokens: int = 0
    error: RequestError | None = None  # why the group ends early
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
        """Number of sequences that have not finished, including those still to be forked from the prompt."""
        return self.params.num_sequences - sum(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that hold blocks, or would hold some if the group were admitted now."""
        return self.unfinished[:1] if self.stage is PROMPT else self.unfinished


@dataclass(slots=True, eq=False)
class Chunk:
    """The ``count`` tokens of one sequence that a step computes, starting at position ``sequence.num_computed``."""

    group: SequenceGroup
    sequence: Sequence
    count: int
    decodes: bool  # the chunk is only its sequence's last token
    row: int = -1  # the chunk's first row of the step's logits, if it includes its sequence's last token
    optional: int = 0  # draft tokens after the chunk's own tokens; the scheduler may lower the number

    @classmethod
    def last_token(cls, group: SequenceGroup, sequence: Sequence) -> Chunk:
        """Return the chunk of a sequence's last token. All other tokens of the sequence must be computed."""
        sequence.decode = sequence.decode or cls(group, sequence, 1, True)
        return sequence.decode

    @property
    def token_ids(self) -> list[int]:
        """The chunk's tokens, except pending tokens. Read this before the step changes ``sequence.num_computed``."""
        first = self.sequence.num_computed
        return self.sequence.token_ids[first : first + self.count]

    @property
    def num_logits(self) -> int:
        """Number of rows of logits: 1 if the chunk has its sequence's last token, else 0. Read this before the step."""
        return int(self.sequence.num_computed + self.count == self.sequence.num_tokens)


@dataclass(slots=True)
class Schedule:
    """The work of one step: decodes (one token per sequence), chunks of prompts, and decodes with draft tokens."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    extended: list[Chunk] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    moves: HostMoves = field(default_factory=HostMoves)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills + self.extended


class Method(Protocol):
    """A decoding method, such as sampling or beam search. Engine and scheduler know only this protocol.

    If a function of this protocol raises for a group, only that group ends, with the error.
    """

    def begin(self, group: SequenceGroup) -> None:
        """Prepare a new group, which has one sequence."""

    def due(self, group: SequenceGroup) -> list[Chunk]:
        """Return all chunks of an admitted group that the next step could compute."""

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        """Fork the group's other sequences from ``leader``, which has just computed the prompt."""

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        """Begin to decide how each chunk's sequence continues.

        The logits of a chunk are row ``chunk.row`` of ``logits``, ``[n, vocab]``. If this method raises, it must leave
        all sequences unchanged: the engine calls it again without the failing group.
        """

    def outputs(self, group: SequenceGroup) -> list[CompletionOutput]:
        """Return everything that a group has generated so far."""


class Flight(Protocol):
    """The decisions of one decoding method in one step, such as drawn tokens, until the CPU knows and applies them."""

    @property
    def may_run_ahead(self) -> bool:
        """Return whether the next step can be launched before the CPU knows these decisions."""

    @property
    def may_compute_ahead(self) -> bool:
        """Return whether the next step's logits can be computed before the CPU knows these decisions."""

    @property
    def groups(self) -> Iterable[SequenceGroup]:
        """Return the groups of the sequences that these decisions continue. A group may be repeated."""

    def wait(self) -> None:
        """Wait until the device has computed the decisions."""

    def conclude(self) -> list[Delta]:
        """Apply the decisions to the sequences. Return the additions to each completion."""

    def discard(self) -> None:
        """Discard the decisions instead of applying them."""
