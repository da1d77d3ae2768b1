"""Speculation: a step computes guesses at a sequence's next tokens together with its last token.

The guesses come from the sequence's own text and its siblings' (`minillm.speculation.lookup`), or from a draft model
(`speculation.drafter`). The step gives the logits of every guess, and from each row the sequence's token for that
position is drawn, which depends on the logits, the seed and the position alone. A guess is right exactly where it is
that token. So the answer is the one that would have come without guesses, whatever its sampling parameters are; only
fewer steps lead to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from minillm.cache import free_tail
from minillm.engine.requests import Requests
from minillm.engine.samples import Draws, Samples
from minillm.model.llama import Llama
from minillm.outputs import Delta, TokenLogprobs
from minillm.runner.device.runner import DeviceRunner
from minillm.runner.device.token_rows import MOST_TOKENS
from minillm.runner.penalties import needs_processing
from minillm.runner.runner import Runner
from minillm.runner.sampler import Drawn, sample_tokens
from minillm.sequence import Chunk, Flight, Sequence, SequenceGroup
from minillm.speculation.drafter import MOST_SEQS, token_bytes
from minillm.speculation.guesses import DraftChunk, Guesses, Lookups
from minillm.speculation.pace import Price

Result = TypeVar("Result")
Results = tuple[list[int], list[TokenLogprobs | None], list[bool]]  # as `Drawn.wait` has them

# Measured with the 135m on 2 cores, int8: 0.3, and 0.09 for each guess (with the weights as stored 0.3 and 0.13).
_CPU_PRICE = Price(0.3, 0.12)
_COMPILED_PRICE = Price(0.35, 0.2)  # beside a step that `minillm.model.one_token` computes; one with guesses is not
# A GPU reads its weights once for all rows of a step, but each layer takes some 5 us more than for one row, and a bit
# for each further one (4 rows of the 135m 1.33 of a step, 16 rows 1.51; of the 8b 1.15 and 1.24). Then it waits for the
# host, 0.2 ms. All that in bytes, as `token_bytes` has it.
_GPU_PRICE = Price(0.08, 0.008, resumptions=8, fewest=7, most=15)
_HOST_BYTES, _LAYER_BYTES, _ROW_BYTES = 500 << 20, 8 << 20, 1 << 19


class GuessingSamples(Samples):
    """`Samples` that guess; see `minillm.sequence.Method`.

    Args:
        draft: the runner's draft model guesses, and this is what a guess costs, in steps; None: guesses are looked up.
    """

    def __init__(self, requests: Requests, runner: Runner, seed: int = 0, draft: float | None = None) -> None:
        super().__init__(requests, runner, seed)
        self._kind = Lookups if draft is None else Guesses
        self._price = replace(_price(runner.model), draft=draft or 0.0)
        self.num_verified = self.num_guessed = self.num_right = 0  # sequences' steps with guesses, and guesses, ever

    def begin(self, group: SequenceGroup) -> None:
        super().begin(group)
        if group.params.grammar is None and group.params.logits_processor is None:
            group.state = self._kind(self._price)

    def due(self, group: SequenceGroup) -> list[Chunk]:
        chunks = super().due(group)
        if group.state is not None and group.state.works and self._few_run():
            for number, chunk in enumerate(chunks):
                if chunk.decodes and group.state.pace(chunk.sequence).is_due() and not chunk.sequence.num_pending:
                    most = MOST_TOKENS // max(1, self._num_running) - 1
                    guessed = partial(group.state.chunk, group, chunk.sequence, most)
                    chunks[number] = _tried(group, guessed, None) or chunk
        return chunks

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        drafted = [chunk for chunk in chunks if isinstance(chunk, DraftChunk) and chunk.optional]
        plain = [chunk for chunk in chunks if not chunk.optional]
        if not drafted:
            draws = self.draw(logits, plain)
            return Unguessed(self, draws) if any(chunk.group.state is not None for chunk in plain) else draws
        rows = [row for chunk in drafted for row in _rows(chunk)]
        drawn = self.draw_drafts(logits, rows, [chunk.sequence for chunk in drafted])
        beside = self.draw(logits, plain) if plain else None
        for chunk in drafted:
            chunk.sequence.num_pending += 1
        return Verification(self, beside, drafted, rows, drawn)

    def draw_drafts(self, logits: Tensor, draws: list[Chunk], holders: list[Sequence]) -> Drawn:
        """Draw for sequences that may never exist: those that ``holders`` become if draft tokens are accepted."""
        runner = self._runner
        drawn = runner.draw_each(draws, holders) if isinstance(runner, DeviceRunner) else None
        if drawn is None:
            runner.give_up(holders)
            drawn = sample_tokens(runner.as_drawn_from(logits), draws)
        return drawn

    def note_guesses(self, chunk: DraftChunk, num_right: int) -> None:
        """Count a step's guesses, and learn from them. There may be none where some were wanted."""
        if chunk.draft:
            self.num_verified += 1
            self.num_guessed += len(chunk.draft)
            self.num_right += num_right
            chunk.group.state.num_accepted[chunk.sequence.index] += num_right
            _tried(chunk.group, lambda: chunk.group.state.learn(chunk, num_right), None)

    def expects(self, chunk: Chunk) -> bool:
        """Whether the next step may guess behind a token that the host must know first."""
        guesses, sequence = chunk.group.state, chunk.sequence
        if guesses is None or not guesses.works or guesses.pace(sequence).left or not self._few_run():
            return False
        return bool(guesses.expects(chunk.group, sequence))

    @property
    def _num_running(self) -> int:
        return sum(group.num_seqs for group in self.requests.scheduler.running)

    def _few_run(self) -> bool:
        return len(self.requests.scheduler.running) <= MOST_SEQS and self._num_running <= MOST_SEQS


def _price(model: Llama) -> Price:
    """What guesses cost beside a model's steps."""
    if model.device.type == "cpu":
        return _CPU_PRICE if model.one_token is None else _COMPILED_PRICE
    whole, layers = token_bytes(model), model.config.num_layers
    host, layer, row = _HOST_BYTES / whole, _LAYER_BYTES * layers / whole, _ROW_BYTES * layers / whole
    return replace(_GPU_PRICE, step=_GPU_PRICE.step + host + layer, each=_GPU_PRICE.each + row, wait=host)


def _tried(group: SequenceGroup, work: Callable[[], Result], otherwise: Result) -> Result:
    """The result of ``work`` on a group's guesses. Where it fails, a defect of ours costs it those, and no token."""
    try:
        return work()
    except Exception as error:
        sys.stderr.write(f"guesses failed: {type(error).__name__}: {error}\n")
        group.state.works = False
        return otherwise


def _rows(chunk: DraftChunk) -> list[Chunk]:
    """The draws from a chunk's rows of logits: from the second on, of a sequence whose guesses so far were right.

    Where the tokens themselves decide about draws, those have groups of their own, for what fails there has not
    happened unless the guesses are right. Otherwise they have the number of their tokens alone: making a list for each
    takes long behind a long context.
    """
    group, sequence = chunk.group, chunk.sequence
    rows: list[Chunk] = [chunk]
    needs_tokens = needs_processing(group, sequence)
    for number in range(1, len(chunk.draft) + 1):
        token_ids = [*sequence.token_ids, *chunk.draft[:number]] if needs_tokens else []
        guessed = Sequence(sequence.seq_id, token_ids, sequence.num_prompt_tokens, sequence.index, sequence.seed)
        guessed.num_pending = 0 if needs_tokens else sequence.num_tokens + number
        rows.append(Chunk(copy(group) if needs_tokens else group, guessed, 0, False, chunk.row + number))
    return rows


@dataclass(slots=True)
class Unguessed:
    """The tokens that one step draws plainly, where the next may guess; see `minillm.sequence.Flight`.

    The host must know them first only if guesses are expected. That is found out when it is asked, as late as possible:
    then all tokens in front of these are known.
    """

    samples: GuessingSamples
    draws: Draws
    waits: bool | None = None

    @property
    def may_run_ahead(self) -> bool:
        return self.draws.may_run_ahead and not self._expects()

    @property
    def may_compute_ahead(self) -> bool:
        return self.draws.may_compute_ahead and not self._expects()

    @property
    def groups(self) -> list[SequenceGroup]:
        return self.draws.groups

    @property
    def is_wanted(self) -> bool:
        return self.draws.is_wanted

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
    """The tokens that one step draws behind guesses, and beside them plainly; see `minillm.sequence.Flight`."""

    samples: GuessingSamples
    plain: Draws | None
    chunks: list[DraftChunk]
    rows: list[Chunk]  # the draws of all chunks, in their order
    drawn: Drawn
    results: Results = ([], [], [])
    may_run_ahead: bool = False  # how many tokens have come decides about everything
    may_compute_ahead: bool = False

    @property
    def groups(self) -> list[SequenceGroup]:
        groups = [] if self.plain is None else self.plain.groups
        return list(dict.fromkeys([*groups, *(chunk.group for chunk in self.chunks)]))

    @property
    def is_wanted(self) -> bool:
        return any(not group.finished for group in self.groups)

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
        """Append the drawn tokens as far as the guesses were right, and one behind them; as one delta, if any."""
        samples, group, sequence, end = self.samples, chunk.group, chunk.sequence, first + 1 + len(chunk.draft)
        draws = zip(*(each[first:end] for each in self.results), self.rows[first:end], strict=True)
        deltas, num_right = list[Delta](), 0
        for guess, (token, logprobs, is_nan, row) in zip([*chunk.draft, None], draws, strict=True):
            if is_nan:
                samples.requests.note_nan(group)
            group.error = group.error or row.group.error
            if group.error is not None:
                break
            deltas.append(samples.append(group, sequence, token, logprobs))
            if sequence.finish_reason is not None or token != guess:
                break
            sequence.num_computed += 1
            num_right += 1
        if sequence.finish_reason is None and sequence.table is not None:
            free_tail(samples.requests.scheduler.cache, sequence.table, sequence.num_computed)
        samples.note_guesses(chunk, num_right)
        return [_joined(deltas)] if deltas else []


def _joined(deltas: list[Delta]) -> Delta:
    """Successive additions to one completion as one."""
    last, text = deltas[-1], "".join(delta.text for delta in deltas)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return Delta(last.request_id, last.index, text, token_ids, last.finish_reason, last.stop_reason)
