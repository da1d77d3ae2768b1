"""Speculative decoding: a step computes draft tokens together with a sequence's last token.

Draft tokens come from n-gram lookup (`minillm.speculation.lookup`) or from a draft model (`speculation.drafter`). Each
row of logits gives the sequence's token for that position, which depends only on the logits, the seed and the position.
A draft token is accepted if it equals that token. So the output is the same as without speculation, for any sampling
parameters, but takes fewer steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

from torch import Tensor

from minillm.cache import free_tail
from minillm.engine.failures import fail_nan
from minillm.engine.requests import Requests
from minillm.engine.samples import PendingDraws, Samples
from minillm.model.llama import Llama
from minillm.model.one_token import CompiledLlama
from minillm.outputs import Delta, TokenLogprobs
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.device.token_rows import MOST_TOKENS
from minillm.runner.drawn import Drawn
from minillm.runner.penalties import needs_processing
from minillm.runner.runner import Runner
from minillm.runner.sampler import sample_tokens
from minillm.sequence import Chunk, Flight, Sequence, SequenceGroup
from minillm.speculation.draft_length import DraftCosts
from minillm.speculation.drafter import MOST_SEQS, token_bytes
from minillm.speculation.drafts import DraftChunk, Drafts, LookupDrafts
from minillm.text.reasoning_budget import NO_LIMIT

Result = TypeVar("Result")
Results = tuple[list[int], list[TokenLogprobs | None], list[bool]]  # as `Drawn.wait` has them

# Measured with the 135m on 2 cores, int8: 0.3, and 0.09 for each draft token (with weights as stored 0.3 and 0.13).
_CPU_COSTS = DraftCosts(0.3, 0.12)
_COMPILED_COSTS = DraftCosts(0.35, 0.2)  # relative to a step of `minillm.model.one_token`, which takes no draft tokens
# A GPU reads its weights once for all rows of a step. But each layer takes some 5 us longer than for one row, and a
# little longer for each further row (135m: 1.33 times a step with 4 rows, 1.51 with 16; 8b: 1.15 and 1.24). Waiting for
# the CPU takes 0.2 ms more. The constants express these times in bytes, as `token_bytes` does.
_GPU_COSTS = DraftCosts(0.08, 0.008, resumptions=8, fewest=7, most=15)
_HOST_BYTES, _LAYER_BYTES, _ROW_BYTES = 500 << 20, 8 << 20, 1 << 19


class SpeculativeSamples(Samples):
    """`Samples` with draft tokens; see `minillm.sequence.Method`.

    Args:
        draft: the time of a draft model's token, relative to a step of the target model. None: n-gram lookup.
    """

    def __init__(self, requests: Requests, runner: Runner, seed: int = 0, draft: float | None = None) -> None:
        super().__init__(requests, runner, seed)
        self._kind = LookupDrafts if draft is None else Drafts
        self._draft_costs = replace(_draft_costs(runner.model), draft=draft or 0.0)
        self.num_drafted = self.num_accepted = 0  # draft tokens that were verified and accepted, since the start

    def begin(self, group: SequenceGroup) -> None:
        super().begin(group)
        if group.params.grammar is None and group.params.logits_processor is None:
            group.state = self._kind(self._draft_costs)

    def due(self, group: SequenceGroup) -> list[Chunk]:
        chunks = super().due(group)
        if group.state is not None and group.state.works and self._few_run():
            for number, chunk in enumerate(chunks):
                is_due = chunk.decodes and group.state.draft_length(chunk.sequence).is_due()
                if is_due and not chunk.sequence.num_pending:
                    most = min(MOST_TOKENS // max(1, self._num_running), _num_free(chunk.sequence)) - 1
                    propose = partial(group.state.chunk, group, chunk.sequence, most)
                    chunks[number] = _tried(group, propose, None) or chunk
        return chunks

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        drafted = [chunk for chunk in chunks if isinstance(chunk, DraftChunk) and chunk.optional]
        plain = [chunk for chunk in chunks if not chunk.optional]
        if not drafted:
            draws = self.draw(logits, plain)
            return PlainDraws(self, draws) if any(chunk.group.state is not None for chunk in plain) else draws
        rows = [row for chunk in drafted for row in _rows(chunk)]
        drawn = self.draw_drafts(logits, rows, [chunk.sequence for chunk in drafted])
        plain_draws = self.draw(logits, plain) if plain else None
        for chunk in drafted:
            chunk.sequence.num_pending += 1
        return Verification(self, plain_draws, drafted, rows, drawn)

    def draw_drafts(self, logits: Tensor, draws: list[Chunk], holders: list[Sequence]) -> Drawn:
        """Draw the target model's own tokens. A draft token is accepted if it equals the token drawn at its position.

        Args:
            draws: the draws that `_rows` returns. Their sequences are copies that include draft tokens.
            holders: the original sequences, without draft tokens.
        """
        runner = self._runner
        drawn = runner.draw_each(draws, holders) if isinstance(runner, DeviceRunner) else None
        if drawn is None:
            runner.give_up(holders)
            drawn = sample_tokens(runner.as_drawn_from(logits), draws)
        return drawn

    def note_verified(self, chunk: DraftChunk, num_accepted: int) -> None:
        """Count a verified chunk's draft tokens, and adapt how many to propose. Without draft tokens, do nothing."""
        if chunk.draft:
            self.num_drafted += len(chunk.draft)
            self.num_accepted += num_accepted
            chunk.group.state.num_accepted[chunk.sequence.index] += num_accepted
            _tried(chunk.group, lambda: chunk.group.state.learn(chunk, num_accepted), None)

    def expects(self, chunk: Chunk) -> bool:
        """Return whether to wait for this chunk's token, because the next step may have draft tokens after it."""
        drafts, sequence = chunk.group.state, chunk.sequence
        if drafts is None or not drafts.works or drafts.draft_length(sequence).left or not self._few_run():
            return False
        return bool(drafts.expects(chunk.group, sequence))

    @property
    def _num_running(self) -> int:
        return sum(group.num_seqs for group in self.requests.scheduler.running)

    def _few_run(self) -> bool:
        return len(self.requests.scheduler.running) <= MOST_SEQS and self._num_running <= MOST_SEQS


def _num_free(sequence: Sequence) -> int:
    """Return how many tokens a sequence can certainly draw before its reasoning limit may force a token."""
    return NO_LIMIT if sequence.reasoning_position is None else sequence.reasoning_position.num_free(sequence.token_ids)


def _draft_costs(model: Llama) -> DraftCosts:
    """Return the costs of draft tokens for a model, relative to a step without draft tokens."""
    if model.device.type == "cpu":
        return _COMPILED_COSTS if isinstance(model, CompiledLlama) else _CPU_COSTS
    whole, layers = token_bytes(model), model.config.num_layers
    host, layer, row = _HOST_BYTES / whole, _LAYER_BYTES * layers / whole, _ROW_BYTES * layers / whole
    return replace(_GPU_COSTS, step=_GPU_COSTS.step + host + layer, each=_GPU_COSTS.each + row, wait=host)


def _tried(group: SequenceGroup, work: Callable[[], Result], otherwise: Result) -> Result:
    """Return the result of ``work`` on a group's draft tokens.

    If ``work`` raises, report the error, return ``otherwise``, and never speculate for this group again.
    """
    try:
        return work()
    except Exception as error:
        sys.stderr.write(f"speculation failed: {type(error).__name__}: {error}\n")
        group.state.works = False
        return otherwise


def _rows(chunk: DraftChunk) -> list[Chunk]:
    """Return a draw for each of a chunk's rows of logits. A draw assumes that the draft tokens before it are accepted.

    If a draw depends on earlier tokens, it gets its own copy of the group. An error of this draw then counts only if
    the draft tokens before it are accepted. Otherwise, the draw's sequence has the right number of tokens but no list
    of tokens, because copying long contexts would take long.
    """
    group, sequence = chunk.group, chunk.sequence
    rows: list[Chunk] = [chunk]
    needs_tokens = needs_processing(group, sequence)
    for number in range(1, len(chunk.draft) + 1):
        token_ids = [*sequence.token_ids, *chunk.draft[:number]] if needs_tokens else []
        drafted = Sequence(sequence.seq_id, token_ids, sequence.num_prompt_tokens, sequence.index, sequence.seed)
        drafted.num_pending = 0 if needs_tokens else sequence.num_tokens + number
        rows.append(Chunk(copy(group) if needs_tokens else group, drafted, 0, False, chunk.row + number))
    return rows


@dataclass(slots=True)
class PlainDraws:
    """The draws of a step without draft tokens; see `minillm.sequence.Flight`.

    If the next step may have draft tokens, it must wait until the CPU knows these draws. `may_run_ahead` decides this
    as late as possible, when the CPU knows all earlier tokens.
    """

    samples: SpeculativeSamples
    draws: PendingDraws
    waits: bool | None = None

    @property
    def may_run_ahead(self) -> bool:
        return self.draws.may_run_ahead and not self._expects()

    @property
    def may_compute_ahead(self) -> bool:
        return self.draws.may_compute_ahead and not self._expects()

    @property
    def groups(self) -> Iterator[SequenceGroup]:
        return self.draws.groups

    def wait(self) -> None:
        self.draws.wait()

    def conclude(self) -> list[Delta]:
        return self.draws.conclude()

    def discard(self) -> None:
        self.draws.discard()

    def _expects(self) -> bool:
        if self.waits is None:
            expects = self.samples.expects
            self.waits = any(_tried(chunk.group, partial(expects, chunk), False) for chunk in self.draws.chunks)
        return self.waits


@dataclass(slots=True)
class Verification:
    """The draws that verify draft tokens, and the plain draws of the same step; see `minillm.sequence.Flight`."""

    samples: SpeculativeSamples
    plain: PendingDraws | None
    chunks: list[DraftChunk]
    rows: list[Chunk]  # the draws of all chunks, in their order
    drawn: Drawn
    results: Results = ([], [], [])
    may_run_ahead: bool = False  # the next step depends on the number of accepted draft tokens
    may_compute_ahead: bool = False

    @property
    def groups(self) -> Iterator[SequenceGroup]:
        return chain(() if self.plain is None else self.plain.groups, (chunk.group for chunk in self.chunks))

    def wait(self) -> None:
        if self.plain is not None:
            self.plain.wait()
        self.results = self.drawn.wait()

    def conclude(self) -> list[Delta]:
        deltas = [] if self.plain is None else self.plain.conclude()
        first = 0
        for chunk in self.chunks:
            chunk.sequence.num_pending -= 1
            if chunk.sequence.finish_reason is None:
                try:
                    deltas += self._go_on(chunk, first)
                except Exception as error:
                    self.samples.requests.scheduler.fail(chunk.group, error)
            first += 1 + len(chunk.draft)
        return deltas

    def discard(self) -> None:
        for chunk in self.chunks:
            chunk.sequence.num_pending = 0
        if self.plain is not None:
            self.plain.discard()

    def _go_on(self, chunk: DraftChunk, first: int) -> list[Delta]:
        """Append a chunk's accepted draft tokens and the token drawn after them. Return at most one delta.

        ``first``: the index of the chunk's first draw in ``rows``.
        """
        samples, group, sequence, end = self.samples, chunk.group, chunk.sequence, first + 1 + len(chunk.draft)
        draws = zip(*(each[first:end] for each in self.results), self.rows[first:end], strict=True)
        deltas, num_accepted = list[Delta](), 0
        for draft, (token, logprobs, is_nan, row) in zip([*chunk.draft, None], draws, strict=True):
            if is_nan:
                fail_nan(samples.requests, group)
            group.error = group.error or row.group.error
            if group.error is not None:
                break
            deltas.append(samples.append(group, sequence, token, logprobs))
            if sequence.finish_reason is not None or token != draft:
                break
            sequence.num_computed += 1
            num_accepted += 1
        if sequence.finish_reason is None and sequence.table is not None:
            free_tail(samples.requests.scheduler.cache, sequence.table, sequence.num_computed)
        samples.note_verified(chunk, num_accepted)
        return [_joined(deltas)] if deltas else []


def _joined(deltas: list[Delta]) -> Delta:
    """Merge consecutive deltas of one completion."""
    last, text = deltas[-1], "".join(delta.text for delta in deltas)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return Delta(last.request_id, last.index, text, token_ids, last.finish_reason, last.stop_reason)
