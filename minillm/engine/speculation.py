"""Speculation: a step computes guesses at a sequence's next tokens together with its last token.

The guesses come from the sequence's own text and its siblings' (`minillm.engine.lookup`), or from a draft model
(`minillm.runner.drafter`). The step gives the logits of every guess, and from each row the sequence's token for that
position is drawn, which depends on the logits, the seed and the position alone. A guess is right exactly where it is
that token. So the answer is the one that would have come without guesses, whatever its sampling parameters are; only
fewer steps lead to it.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import dataclass, replace

from torch import Tensor

from minillm.engine.lookup import Occurrences, Source
from minillm.engine.pace import DraftPace, LookupPace, Pace, Price
from minillm.engine.requests import Requests
from minillm.engine.samples import Draws, Samples
from minillm.outputs import Delta, TokenLogprobs
from minillm.runner.drafter import MOST_SEQS
from minillm.runner.runner import Runner
from minillm.runner.sampler import Drawn
from minillm.sequence import Chunk, Flight, Sequence, SequenceGroup

# Measured with the 135m on 2 cores, int8: 0.3, and 0.09 for each guess (with the weights as stored 0.3 and 0.13).
# A GPU reads its weights once for all rows of a step; the rest is what the host does meanwhile, as estimated. A search
# costs it 0.07 of a step of the 8b (one H200).
_CPU_PRICE, _GPU_PRICE = Price(0.3, 0.12), Price(0.2, 0.02, search=0.07, resumptions=8)
_COMPILED_PRICE = Price(0.35, 0.2)  # beside a step that `minillm.model.one_token` computes; one with guesses is not
_RESUMED = 3  # tokens that are guessed where a text may go on with what it has parted from


class Guesses:
    """What a group knows in order to guess: how many tokens a draft model shall guess for each of its sequences."""

    def __init__(self, price: Price) -> None:
        self.price = price
        self.works = True  # until guessing has failed
        self._paces: dict[int, Pace] = {}  # by the completion's index

    def pace(self, sequence: Sequence) -> Pace:
        if sequence.index not in self._paces:
            self._paces[sequence.index] = self._new_pace()
        return self._paces[sequence.index]

    def chunk(self, group: SequenceGroup, sequence: Sequence) -> Chunk | None:
        """A sequence's last token and guesses behind it, if there are any."""
        # Behind the guesses one more token is drawn.
        count = min(self.pace(sequence).count, group.max_tokens - sequence.num_output_tokens - 1)
        return self._guessed(group, sequence, count) if count > 0 else None

    def learn(self, chunk: Chunk, num_right: int) -> None:
        """Learn from a step whose first ``num_right`` guesses were right."""
        self.pace(chunk.sequence).judge(len(chunk.draft), num_right)

    def _new_pace(self) -> Pace:
        return DraftPace(self.price)

    def _guessed(self, group: SequenceGroup, sequence: Sequence, count: int) -> Chunk | None:
        return Chunk(group, sequence, 1, True, num_guesses=count)


class Lookups(Guesses):
    """The same where guesses are looked up in the texts of the group's sequences."""

    def __init__(self, price: Price) -> None:
        super().__init__(price)
        self._occurrences = Occurrences()
        self._noted: dict[int, int] = {}  # tokens of each completion that are in the index
        self._sources: dict[int, Source] = {}  # of each completion's latest guesses

    def learn(self, chunk: Chunk, num_right: int) -> None:
        super().learn(chunk, num_right)
        if num_right < len(chunk.draft):
            self._sources[chunk.sequence.index].part(num_right)
        else:
            self._sources.pop(chunk.sequence.index, None)

    def _new_pace(self) -> Pace:
        return LookupPace(self.price)

    def _guessed(self, group: SequenceGroup, sequence: Sequence, count: int) -> Chunk | None:
        for each in group.sequences:  # all have the same prompt: it is noted once
            first = self._noted.get(each.index, each.num_prompt_tokens if self._noted else 0)
            self._noted[each.index] = end = len(each.token_ids) - 1  # nothing has followed the last token yet
            self._occurrences.add(each.token_ids, first, end)
        source = self._occurrences.source(sequence.token_ids)
        if source is None:
            source, count = self._resumed(sequence), min(count, _RESUMED)
        found = () if source is None else source.tokens(count, sequence.token_ids)
        if source is None or not found:
            self.pace(sequence).judge(0, 0)
            return None
        self._sources[sequence.index] = source
        return Chunk(group, sequence, 1, True, num_guesses=len(found), draft=found)

    def _resumed(self, sequence: Sequence) -> Source | None:
        """What a sequence has parted from, if it may go on with it now."""
        source, pace = self._sources.get(sequence.index), self.pace(sequence)
        assert isinstance(pace, LookupPace)
        if source is None or not pace.resumes(source.num_tries):
            return None
        source.num_tries += 1
        return source


class GuessingSamples(Samples):
    """`Samples` that guess; see `minillm.sequence.Method`.

    Args:
        draft: the runner's draft model guesses, and this is what a guess costs, in steps; None: guesses are looked up.
    """

    def __init__(self, requests: Requests, runner: Runner, seed: int = 0, draft: float | None = None) -> None:
        super().__init__(requests, runner, seed)
        if runner.model.device.type != "cpu":
            price = _GPU_PRICE
        else:
            price = _CPU_PRICE if runner.model.one_token is None else _COMPILED_PRICE
        self._kind = Lookups if draft is None else Guesses
        self._price = replace(price, draft=draft or 0.0)
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
                    chunks[number] = _guessed(group, chunk.sequence) or chunk
        return chunks

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        drafted = [chunk for chunk in chunks if chunk.num_guesses]
        plain = [chunk for chunk in chunks if not chunk.num_guesses]
        draws = self.draw(logits, plain) if plain else None
        if draws is not None and not drafted:
            if any(map(self._may_guess, draws.chunks)):
                draws.may_run_ahead = draws.may_compute_ahead = False
            return draws
        rows = [row for chunk in drafted for row in _rows(chunk)]
        drawn = self._runner.draw_guessed(logits, rows, [chunk.sequence for chunk in drafted])
        for chunk in drafted:
            chunk.sequence.num_pending += 1
        return Verification(self, draws, drafted, rows, drawn)

    def note_guesses(self, chunk: Chunk, num_right: int) -> None:
        """Count a step's guesses, and learn from them. There may be none where some were wanted."""
        if not chunk.draft:
            return
        self.num_verified += 1
        self.num_guessed += len(chunk.draft)
        self.num_right += num_right
        chunk.sequence.num_guessed += num_right
        try:
            chunk.group.state.learn(chunk, num_right)
        except Exception as error:
            _give_up(chunk.group, error)

    def _few_run(self) -> bool:
        running = self.requests.scheduler.running
        return len(running) <= MOST_SEQS and sum(group.num_seqs for group in running) <= MOST_SEQS

    def _may_guess(self, chunk: Chunk) -> bool:
        """Whether the next step looks for guesses behind a token that the host must know first."""
        guesses = chunk.group.state
        return guesses is not None and guesses.works and not guesses.pace(chunk.sequence).left and self._few_run()


def _guessed(group: SequenceGroup, sequence: Sequence) -> Chunk | None:
    """`Guesses.chunk`, or nothing where it fails."""
    try:
        chunk: Chunk | None = group.state.chunk(group, sequence)
        return chunk
    except Exception as error:
        _give_up(group, error)
        return None


def _give_up(group: SequenceGroup, error: Exception) -> None:
    """Guess no more for a group: a defect of ours costs it that, and no token."""
    sys.stderr.write(f"guesses failed: {type(error).__name__}: {error}\n")
    group.state.works = False


def _rows(chunk: Chunk) -> list[Chunk]:
    """The draws from a chunk's rows of logits: from the second on, of a sequence whose guesses so far were right.

    Those have groups of their own, for what fails there has not happened unless the guesses are right.
    """
    rows, group, sequence = [chunk], chunk.group, chunk.sequence
    for number in range(1, len(chunk.draft) + 1):
        token_ids = [*sequence.token_ids, *chunk.draft[:number]]
        guessed = Sequence(sequence.seq_id, token_ids, sequence.num_prompt_tokens, sequence.index, sequence.seed)
        rows.append(Chunk(copy(group), guessed, 0, False, chunk.row + number))
    return rows


@dataclass(slots=True)
class Verification:
    """The tokens that one step draws behind guesses, and beside them plainly; see `minillm.sequence.Flight`."""

    samples: GuessingSamples
    plain: Draws | None
    chunks: list[Chunk]
    rows: list[Chunk]  # the draws of all chunks, in their order
    drawn: Drawn
    results: tuple[list[int], list[TokenLogprobs | None], list[bool]] = ([], [], [])
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
                deltas += self._go_on(chunk, first)
            first += 1 + len(chunk.draft)
        return deltas

    def discard(self) -> None:
        for chunk in self.chunks:
            chunk.sequence.num_pending = 0
        if self.plain is not None:
            self.plain.discard()

    def _go_on(self, chunk: Chunk, first: int) -> list[Delta]:
        """Append the drawn tokens as far as the guesses were right, and one behind them; as one delta, if any."""
        samples, group, sequence = self.samples, chunk.group, chunk.sequence
        tokens, logprobs, are_nan = self.results
        deltas: list[Delta] = []
        num_right = 0
        for row, guess in enumerate([*chunk.draft, None], first):
            if are_nan[row]:
                samples.requests.note_nan(group)
            group.error = group.error or self.rows[row].group.error
            if group.error is not None:
                break
            deltas.append(samples.append(group, sequence, tokens[row], logprobs[row]))
            if sequence.finish_reason is not None or tokens[row] != guess:
                break
            sequence.num_computed += 1  # as the guess that it was
            num_right += 1
        if sequence.finish_reason is None and sequence.table is not None:
            samples.requests.scheduler.cache.free_tail(sequence.table, sequence.num_computed)
        samples.note_guesses(chunk, num_right)
        return [_joined(deltas)] if deltas else []


def _joined(deltas: list[Delta]) -> Delta:
    """Successive additions to one completion as one."""
    last, text = deltas[-1], "".join(delta.text for delta in deltas)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return Delta(last.request_id, last.index, text, token_ids, last.finish_reason, last.stop_reason)
