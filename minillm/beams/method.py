"""Beam search as a decoding method: each step forks and frees the block tables of the beams.

The sequences of a group are the running beams. They advance together, because each step chooses among all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from minillm.beams.candidates import BeamStep, beam_candidates, token_logprobs
from minillm.beams.choice import BeamState, Choice, Hypothesis
from minillm.beams.device_searches import PendingSearches
from minillm.beams.search import BeamSearch, Candidate
from minillm.engine.failures import fail_nan
from minillm.engine.forks import fork
from minillm.engine.requests import Requests
from minillm.errors import RequestError
from minillm.kernels import Search
from minillm.outputs import CompletionOutput, Delta, TokenLogprobs
from minillm.params import BeamSearchParams
from minillm.runner.device.beams import DeviceBeams, DeviceSearch
from minillm.runner.penalties import NOTHING_ALLOWED, needs_processing
from minillm.sequence import PROMPT, Chunk, Flight, Sequence, SequenceGroup, Stage
from minillm.text.stop import OutputText


class Beams:
    """The decoding method of beam search requests; see `minillm.sequence.Method`.

    With a ``device``, searches without diversity penalties, stop strings and log-probabilities run there: the device
    chooses beams and forks their blocks. The CPU applies the same choice to its sequences one step later.
    """

    def __init__(self, requests: Requests, device: DeviceBeams | None = None) -> None:
        self.requests, self._device = requests, device

    def begin(self, group: SequenceGroup) -> None:
        params, tokenizer = group.params, self.requests.tokenizer
        assert isinstance(params, BeamSearchParams)
        options = params.length_penalty, params.early_stopping, group.max_tokens
        width, count = params.beam_width // params.num_beam_groups, params.num_beam_groups
        group.state = BeamState([BeamSearch(width, *options) for _ in range(count)])
        if params.stop and tokenizer is not None:
            detokenizer = tokenizer.detokenizer(group.sequences[0].token_ids)
            group.sequences[0].text = OutputText(detokenizer, tuple(params.stop), params.min_tokens)
        # Diversity penalties, stop strings, log-probabilities, ``hold`` and a limit on reasoning need the CPU at each
        # step.
        on_cpu = count > 1 or group.sequences[0].text is not None or params.logprobs is not None or group.hold
        on_cpu = on_cpu or params.max_reasoning_tokens is not None
        if self._device is not None and not on_cpu:
            search = Search(width, group.state.searches[0].num_candidates(len(group.end_ids)), group.end_ids)
            group.state.search = DeviceSearch(search) if search.fits(self.requests.vocab_size) else None

    def due(self, group: SequenceGroup) -> list[Chunk]:
        if group.stage is PROMPT:
            leader = group.computing[0]
            return [Chunk(group, leader, leader.num_prompt_tokens - leader.num_computed, False)]
        pending = group.sequences[0].num_pending
        if pending and group.sequences[0].num_output_tokens + pending >= group.max_tokens:
            return []  # the pending tokens are the last ones
        # Beams decode together: no beam computes its last token while another lacks earlier tokens.
        behind = [(beam, left) for beam in group.sequences if (left := beam.num_tokens - 1 - beam.num_computed)]
        if behind:
            group.device = None
            return [Chunk(group, beam, left, False) for beam, left in behind]
        group.device = group.state.search if self._is_for_device(group) else None
        if group.device is not None:
            count_common_blocks(group, self.requests.scheduler.cache.block_size)
        return [beam.decode or Chunk.last_token(group, beam) for beam in group.sequences]

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        if group.state.beams:  # otherwise the first step of the search creates the other beams
            self.requests.fork_prompt(group, leader)

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        on_device = [chunk for chunk in chunks if chunk.group.device]
        on_cpu = [chunk for chunk in chunks if not chunk.group.device]
        choices = None if self._device is None else self._device.take_choices()
        if choices is None:
            assert not on_device, "the device has run no step of its searches"
            return self._search(logits, on_cpu)
        groups, chosen = choices
        # A group in ``groups`` without a chunk has ended since its step was launched.
        indices = {chunk.group: groups.index(chunk.group) for chunk in on_device}
        for chunk in on_device:
            chunk.sequence.num_pending += 1
        others = self._search(logits, on_cpu) if on_cpu else None
        return PendingSearches(self.apply_choice, self.requests, indices, chosen, others)

    def _search(self, logits: Tensor, chunks: list[Chunk]) -> Searches:
        rows: dict[SequenceGroup, dict[int, int]] = {}
        for chunk in chunks:
            rows.setdefault(chunk.group, {})[chunk.sequence.seq_id] = chunk.row
        return Searches(self, logits, list(rows.items()))

    def _is_for_device(self, group: SequenceGroup) -> bool:
        """Return whether the device runs the next step of a group's search.

        The caller ensures that each beam lacks K and V only for its last token.
        """
        found = group.state.search
        if found is None or group.device is not None:
            return found is not None
        begun = bool(group.state.beams) and len(group.sequences) == found.search.width
        return begun and not needs_processing(group, group.sequences[0])

    def outputs(self, group: SequenceGroup) -> list[CompletionOutput]:
        assert isinstance(group.params, BeamSearchParams)
        best = _best_first(group)[: group.params.n or group.params.beam_width]
        return [self._output(group, index, *entry) for index, entry in enumerate(best)]

    def _output(
        self, group: SequenceGroup, index: int, score: float, logprob: float, beam: Hypothesis
    ) -> CompletionOutput:
        text, tokenizer, ids = beam.text, self.requests.tokenizer, beam.token_ids
        if text is None and tokenizer is not None:
            text = OutputText(tokenizer.detokenizer(group.sequences[0].token_ids[: group.num_prompt_tokens]))
            ended = beam.finish_reason == "stop" and ids[-1:] and ids[-1] in group.end_ids
            for token_id in ids[:-1] if ended else ids:
                text.push(token_id)
            text.finish()
        logprobs, shown = None if group.params.logprobs is None else beam.logprobs, "" if text is None else text.text
        return CompletionOutput(index, shown, ids, logprob, logprobs, beam.finish_reason, beam.stop_reason, score)

    def advance(
        self, step: BeamStep, candidates: list[list[Candidate]], logprobs: dict[tuple[int, int], TokenLogprobs]
    ) -> list[Delta]:
        """Choose the continuations that survive, and fork, append and free their sequences. K and V are not moved.

        Args:
            candidates: the best continuations for each of the step's searches, best first.
            logprobs: log-probabilities of the continuations, by (row of logits, token), if the request wants them.
        """
        return self._advance(step, candidates, logprobs, self._replace_beams)

    def apply_choice(self, step: BeamStep, candidates: list[Candidate]) -> list[Delta]:
        """Apply the device's choice for a group's only search to the CPU's sequences.

        The device has already forked the block tables of its own beams.
        """
        return self._advance(step, [candidates], {}, self._follow_device_rows)

    def _advance(
        self,
        step: BeamStep,
        candidates: list[list[Candidate]],
        logprobs: dict[tuple[int, int], TokenLogprobs],
        replace_beams: Callable[[SequenceGroup, list[Choice], list[list[Candidate]]], None],
    ) -> list[Delta]:
        group, state = step.group, step.group.state
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.monotonic()
        for choice in step.choices:
            choice.logprobs = logprobs
        searching = zip(state.searches, candidates, step.choices, strict=True)
        survivors = [[] if s.done else s.advance(each, choice.ends, choice.hypothesis) for s, each, choice in searching]
        if state.done and not any(search.finished for search in state.searches):
            group.error = NOTHING_ALLOWED
            return []
        if state.done:
            for sequence in group.sequences:
                self.requests.end_sequence(group, sequence, "stop")
        else:
            replace_beams(group, step.choices, survivors)
        if not group.streamed:
            return []
        best = self._output(group, 0, *max(_best_first(group), key=lambda entry: entry[0]))
        ended = best.finish_reason, best.stop_reason
        return [Delta(group.request_id, 0, best.text, best.token_ids, *ended, replaces=True)]

    def _replace_beams(self, group: SequenceGroup, choices: list[Choice], survivors: list[list[Candidate]]) -> None:
        taken: set[int] = set()
        beams: list[list[Sequence]] = []
        grown: list[tuple[Sequence, Choice, Candidate]] = []
        for choice, chosen in zip(choices, survivors, strict=True):
            beams.append([])
            for candidate in chosen:
                sequence = parent = choice.beams[candidate.beam]
                if parent.seq_id in taken:
                    sequence = fork(self.requests, parent, len(parent.token_ids))
                    group.sequences.append(sequence)  # so that its blocks are freed if anything fails from here on
                    sequence.logprobs = parent.logprobs.copy()
                taken.add(sequence.seq_id)
                beams[-1].append(sequence)
                grown.append((sequence, choice, candidate))
        for sequence in group.sequences:
            if sequence.seq_id not in taken:
                self.requests.scheduler.preemption.free(sequence)
        # After the loop: a parent's history must be copied before it grows.
        for index, (sequence, choice, candidate) in enumerate(grown):
            sequence.index, sequence.cumulative_logprob = index, candidate.logprob
            if choice.has_text:
                sequence.text = choice.text(candidate)
            sequence.matcher = choice.matcher(candidate)
            sequence.token_ids.append(candidate.token_id)
            if choice.logprobs:
                sequence.logprobs += choice.token(candidate)
        group.state.beams, group.stage = beams, Stage.SPLIT
        group.sequences = [sequence for sequence, _, _ in grown]

    def _follow_device_rows(
        self, group: SequenceGroup, choices: list[Choice], survivors: list[list[Candidate]]
    ) -> None:
        """Replace each beam that did not survive by a fork of a surviving beam.

        `kernels.choose_beams` has replaced the beams in the device state in the same order.
        """
        [choice], [chosen], preemption = choices, survivors, self.requests.scheduler.preemption
        if len(chosen) < len(group.sequences):
            group.error = NOTHING_ALLOWED
            return
        parents = [choice.beams[candidate.beam] for candidate in chosen]
        living = {parent.seq_id for parent in parents}
        dead = iter([sequence for sequence in group.sequences if sequence.seq_id not in living])
        beams: list[Sequence] = []
        taken: set[int] = set()
        for parent in parents:
            sequence = parent
            if parent.seq_id in taken:
                sequence = next(dead)
                sequence.token_ids = parent.token_ids.copy()
                preemption.fork_into(sequence, parent, len(parent.token_ids))
            taken.add(parent.seq_id)
            beams.append(sequence)
        # After the loop: a parent's history must be copied before it grows.
        for index, (sequence, candidate) in enumerate(zip(beams, chosen, strict=True)):
            sequence.index, sequence.cumulative_logprob = index, candidate.logprob
            sequence.token_ids.append(candidate.token_id)
        group.state.beams = [beams]


@dataclass(slots=True)
class Searches:
    """The beam searches that the CPU advances, not the device, in one engine step; see `minillm.sequence.Flight`."""

    beams: Beams
    logits: Tensor
    searching: list[tuple[SequenceGroup, dict[int, int]]]  # seq_id -> row of logits, for each group
    found: list[tuple[BeamStep, list[list[Candidate]]]] = field(default_factory=list)
    may_run_ahead: bool = False
    may_compute_ahead: bool = False

    @property
    def groups(self) -> list[SequenceGroup]:
        return [group for group, _ in self.searching]

    def wait(self) -> None:
        steps = [beam_step(group, row_of) for group, row_of in self.searching if not group.finished]
        try:
            self.found = list(zip(steps, beam_candidates(self.logits, steps), strict=True)) if steps else []
        except Exception:
            for step in steps:
                try:
                    self.found.append((step, beam_candidates(self.logits, [step])[0]))
                except Exception as error:
                    self.beams.requests.scheduler.fail(step.group, error)

    def conclude(self) -> list[Delta]:
        deltas = []
        for step, candidates in self.found:
            try:
                deltas += self._conclude(step, candidates)
            except Exception as error:
                self.beams.requests.scheduler.fail(step.group, error)
        return deltas

    def _conclude(self, step: BeamStep, candidates: list[list[Candidate]]) -> list[Delta]:
        if any(math.isnan(candidate.logprob) for each in candidates for candidate in each):
            fail_nan(self.beams.requests, step.group)
            return []
        step.group.error = step.group.error or grammar_error(step)
        if step.group.error is not None:
            return []
        return self.beams.advance(step, candidates, self._logprobs(step, candidates))

    def discard(self) -> None:
        self.searching = []

    def _logprobs(self, step: BeamStep, candidates: list[list[Candidate]]) -> dict[tuple[int, int], TokenLogprobs]:
        """Return the model's own log-probabilities of all continuations, by (row of logits, token).

        The result is empty if the request does not want log-probabilities.
        """
        count = step.group.params.logprobs
        if count is None:
            return {}
        found = ((rows, each) for rows, beams in zip(step.rows, candidates, strict=True) for each in beams)
        wanted = list(dict.fromkeys((rows[each.beam], each.token_id) for rows, each in found))
        return dict(zip(wanted, token_logprobs(self.logits, wanted, count), strict=True))


def beam_step(group: SequenceGroup, row_of: dict[int, int]) -> BeamStep:
    """Return a group's beams for this step. ``row_of`` maps the seq_id of a beam to its row of logits.

    In the first step, each search has one beam: the prompt.
    """
    beams = group.state.beams or [[group.sequences[0]]] * len(group.state.searches)
    return BeamStep(group, [Choice(group, [row_of[beam.seq_id] for beam in each], each) for each in beams])


def count_common_blocks(group: SequenceGroup, block_size: int) -> None:
    """Tell the device how many full blocks, from the first one on, all beams of a group share.

    Beams that are forked later share these blocks as well.
    """
    first, state, count = group.sequences[0], group.state, group.device.num_common_blocks
    if first.table is None:  # preempted in this step
        return
    if state.counted is not first.table:
        state.counted, count = first.table, 0
    tables, full = [beam.blocks for beam in group.sequences], first.num_computed // block_size
    while count < full and len({blocks[count] for blocks in tables}) == 1:
        count += 1
    group.device.num_common_blocks = count


def grammar_error(step: BeamStep) -> RequestError | None:
    """Return the first grammar error among the step's beams, or None."""
    matchers = [beam.matcher for beams in step.beams for beam in beams if beam.matcher is not None]
    return next((matcher.error for matcher in matchers if matcher.error is not None), None)


def output_indices(group: SequenceGroup) -> dict[int, int]:
    """Return the rank of each running beam among all answers so far: seq_id -> rank. The best rank is 0.

    Finished beams have ranks as well. If there are more beams than requested answers, the surplus beams rank last. The
    result is empty if the search is done.
    """
    state: BeamState = group.state
    running = [beam for beams in state.beams for beam in beams]
    entries = _best_first(group)
    first, most = len(entries) - len(running), group.params.n or group.params.num_sequences
    if state.done or first < 0:
        return {}
    order = sorted(range(len(entries)), key=lambda number: (number >= most, -entries[number][0]))
    at = {number: rank for rank, number in enumerate(order)}
    return {beam.seq_id: at[first + number] for number, beam in enumerate(running)}


def _best_first(group: SequenceGroup) -> list[tuple[float, float, Hypothesis]]:
    """Return (score, log-probability, beam) of all finished beams, best first, and after them of all running beams.

    If the search is done and has finished beams, running beams are left out.
    """
    state: BeamState = group.state
    found = [(each.score, each.logprob, each.beam) for search in state.searches for each in search.finished]
    found.sort(key=lambda entry: -entry[0])
    if state.done and found:
        return found
    for search, beams in zip(state.searches, state.beams, strict=False):
        for logprob, sequence in zip(search.logprobs, beams, strict=False):
            score = logprob / max(1, sequence.num_output_tokens) ** search.length_penalty
            beam = Hypothesis(sequence.output_token_ids, sequence.logprobs, sequence.text, sequence.finish_reason)
            found.append((score, logprob, beam))
    return found
