"""Beam search as a method of decoding: it forks and frees the tables of the sequences that are its beams.

The sequences of a group are the running beams. They advance together, because each step chooses among all of them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from torch import Tensor

from minillm.beams.candidates import BeamStep, beam_candidates, token_logprobs
from minillm.beams.search import BeamSearch, Candidate
from minillm.engine.requests import Requests
from minillm.grammar.matcher import Matcher
from minillm.outputs import CompletionOutput, Delta, FinishReason, TokenLogprobs
from minillm.params import BeamSearchParams
from minillm.runner.penalties import NO_TOKEN
from minillm.sequence import PROMPT, Chunk, Sequence, SequenceGroup, Stage
from minillm.text.stop import OutputText


@dataclass
class Hypothesis:
    """A beam that has ended, or as it stands."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    text: OutputText | None  # where the request has stop strings; otherwise text is made when it is asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class BeamState:
    """The searches of one request, one for each group of its beams, and their running beams, the best first."""

    searches: list[BeamSearch[Hypothesis]]
    beams: list[list[Sequence]] = field(default_factory=list)  # empty before the first step

    @property
    def done(self) -> bool:
        return all(search.done for search in self.searches)


class Beams:
    """The beam searches of all requests; see `minillm.sequence.Method`."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def begin(self, group: SequenceGroup) -> None:
        params, tokenizer = group.params, self.requests.tokenizer
        assert isinstance(params, BeamSearchParams)
        options = params.length_penalty, params.early_stopping, group.max_tokens
        width, count = params.beam_width // params.num_beam_groups, params.num_beam_groups
        group.state = BeamState([BeamSearch(width, *options) for _ in range(count)])
        if params.stop and tokenizer is not None:
            detokenizer = tokenizer.detokenizer(group.sequences[0].token_ids)
            group.sequences[0].text = OutputText(detokenizer, tuple(params.stop), params.min_tokens)

    def due(self, group: SequenceGroup) -> list[Chunk]:
        if group.stage is PROMPT:
            leader = group.computing[0]
            return [Chunk(group, leader, leader.num_prompt_tokens - leader.num_computed, False)]
        # Beams decode in step: the last token of each waits until all have come as far.
        behind = [(beam, left) for beam in group.sequences if (left := len(beam.token_ids) - 1 - beam.num_computed)]
        if behind:
            return [Chunk(group, beam, left, False) for beam, left in behind]
        return [beam.decode or Chunk.last_token(group, beam) for beam in group.sequences]

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        if group.state.beams:  # otherwise the first step of the search makes the other beams
            self.requests.fork_prompt(group, leader)

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Searches:
        rows: dict[SequenceGroup, dict[int, int]] = {}
        for chunk in chunks:
            rows.setdefault(chunk.group, {})[chunk.sequence.seq_id] = chunk.row
        return Searches(self, logits, list(rows.items()))

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
        """Choose the beams that live on, and fork, append and free accordingly. No K or V moves.

        Args:
            candidates: the best continuations for each of the step's searches, the best first.
            logprobs: of the continuations, by row of logits and token, where the request wants them.
        """
        group, state = step.group, step.group.state
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.monotonic()
        choices = [_Choice(group, rows, beams, logprobs) for rows, beams in zip(step.rows, step.beams, strict=True)]
        searching = zip(state.searches, candidates, choices, strict=True)
        survivors = [[] if s.done else s.advance(each, choice.ends, choice.hypothesis) for s, each, choice in searching]
        if state.done and not any(search.finished for search in state.searches):
            group.error = NO_TOKEN
            return []
        if state.done:
            for sequence in group.sequences:
                self.requests.end_sequence(group, sequence, "stop")
        else:
            self._replace_beams(group, choices, survivors)
        if not group.streamed:
            return []
        best = self._output(group, 0, *max(_best_first(group), key=lambda entry: entry[0]))
        ended = best.finish_reason, best.stop_reason
        return [Delta(group.request_id, 0, best.text, best.token_ids, *ended, replaces=True)]

    def _replace_beams(self, group: SequenceGroup, choices: list[_Choice], survivors: list[list[Candidate]]) -> None:
        taken: set[int] = set()
        beams: list[list[Sequence]] = []
        grown: list[tuple[Sequence, _Choice, Candidate]] = []
        for choice, chosen in zip(choices, survivors, strict=True):
            beams.append([])
            for candidate in chosen:
                sequence = parent = choice.beams[candidate.beam]
                if parent.seq_id in taken:
                    sequence = self.requests.fork(parent, len(parent.token_ids))
                    sequence.logprobs = parent.logprobs.copy()
                taken.add(parent.seq_id)
                beams[-1].append(sequence)
                grown.append((sequence, choice, candidate))
        for sequence in group.sequences:
            if sequence.seq_id not in taken:
                self.requests.scheduler.free(sequence)
        # Only now: a parent's history must be copied before it grows.
        for index, (sequence, choice, candidate) in enumerate(grown):
            sequence.index = index
            if choice.has_text:
                sequence.text = choice.text(candidate)
            sequence.matcher = choice.matcher(candidate)
            sequence.token_ids.append(candidate.token_id)
            if choice.logprobs:
                sequence.logprobs += choice.token(candidate)
        group.state.beams, group.stage = beams, Stage.SPLIT
        group.sequences = [sequence for sequence, _, _ in grown]


@dataclass
class _Choice:
    """One search at one step: the rows of logits and the sequences of its beams, and properties of its candidates."""

    group: SequenceGroup
    rows: list[int]
    beams: list[Sequence]
    logprobs: dict[tuple[int, int], TokenLogprobs]
    texts: dict[tuple[int, int], OutputText] = field(default_factory=dict)  # by beam and token
    matchers: dict[tuple[int, int], Matcher] = field(default_factory=dict)  # likewise

    def __post_init__(self) -> None:
        self.end_ids, self.has_text = self.group.end_ids, self.beams[0].text is not None

    def text(self, candidate: Candidate) -> OutputText | None:
        """The text of a continuation, where the request has stop strings."""
        before = self.beams[candidate.beam].text
        if before is None:
            return None
        key = candidate.beam, candidate.token_id
        if key not in self.texts:
            self.texts[key] = before.copy()
            if candidate.token_id not in self.end_ids:
                self.texts[key].push(candidate.token_id)
        return self.texts[key]

    def matcher(self, candidate: Candidate) -> Matcher | None:
        """Where a continuation stands in the request's grammar; a failure becomes the group's error."""
        before = self.beams[candidate.beam].matcher
        if before is None:
            return None
        key = candidate.beam, candidate.token_id
        if key not in self.matchers:
            self.matchers[key] = after = before.copy()
            after.advance(candidate.token_id, ends=candidate.token_id in self.end_ids)
            self.group.error = self.group.error or after.error
        return self.matchers[key]

    def token(self, candidate: Candidate) -> list[TokenLogprobs]:
        found = self.logprobs.get((self.rows[candidate.beam], candidate.token_id))
        return [] if found is None else [found]

    def ends(self, candidate: Candidate) -> bool:
        """Whether an end token, a stop string or the end of the grammar completes a continuation."""
        if candidate.token_id in self.end_ids:
            return True
        matcher = self.matcher(candidate)
        if matcher is not None and matcher.is_complete(self.end_ids):
            return True
        text = self.text(candidate) if self.has_text else None
        return text is not None and text.matched is not None

    def hypothesis(self, candidate: Candidate) -> Hypothesis:
        """A continuation that has ended, at its last token or because it is as long as it may be."""
        beam, text, token_id = self.beams[candidate.beam], self.text(candidate), candidate.token_id
        stop_reason: str | int | None = None
        if text is not None:
            text.finish()
            stop_reason = text.matched
        if token_id in tuple(self.group.params.stop_token_ids):
            stop_reason = token_id
        reason: FinishReason = "stop" if self.ends(candidate) else "length"
        logprobs = beam.logprobs + self.token(candidate)
        return Hypothesis([*beam.output_token_ids, token_id], logprobs, text, reason, stop_reason)


@dataclass(slots=True)
class Searches:
    """The beam searches that one step advances; see `minillm.sequence.Flight`."""

    beams: Beams
    logits: Tensor
    searching: list[tuple[SequenceGroup, dict[int, int]]]  # with the row of logits of each of the group's sequences
    found: list[tuple[BeamStep, list[list[Candidate]]]] = field(default_factory=list)
    may_run_ahead: bool = False
    may_decide_ahead: bool = False

    @property
    def groups(self) -> list[SequenceGroup]:
        return [group for group, _ in self.searching]

    @property
    def is_wanted(self) -> bool:
        return any(not group.finished for group in self.groups)

    def wait(self) -> None:
        steps = [beam_step(group, row_of) for group, row_of in self.searching if not group.finished]
        self.found = list(zip(steps, beam_candidates(self.logits, steps), strict=True)) if steps else []

    def conclude(self) -> list[Delta]:
        deltas = []
        for step, candidates in self.found:
            if any(math.isnan(candidate.logprob) for each in candidates for candidate in each):
                self.beams.requests.note_nan(step.group)
                continue
            step.group.error = step.group.error or grammar_error(step)
            if step.group.error is None:
                deltas += self.beams.advance(step, candidates, self._logprobs(step, candidates))
        return deltas

    def discard(self) -> None:
        self.searching = []

    def _logprobs(self, step: BeamStep, candidates: list[list[Candidate]]) -> dict[tuple[int, int], TokenLogprobs]:
        """The model's own log-probabilities of all continuations, where the request wants them."""
        count = step.group.params.logprobs
        if count is None:
            return {}
        found = ((rows, each) for rows, beams in zip(step.rows, candidates, strict=True) for each in beams)
        wanted = list(dict.fromkeys((rows[each.beam], each.token_id) for rows, each in found))
        return dict(zip(wanted, token_logprobs(self.logits, wanted, count), strict=True))


def beam_step(group: SequenceGroup, row_of: dict[int, int]) -> BeamStep:
    """One request's beams at this step. In its first step all searches have one beam, the prompt."""
    beams = group.state.beams or [[group.sequences[0]]] * len(group.state.searches)
    return BeamStep(group, [[row_of[sequence.seq_id] for sequence in each] for each in beams], beams)


def grammar_error(step: BeamStep) -> str | None:
    """Why a beam's grammar has failed; None where none has."""
    matchers = [beam.matcher for beams in step.beams for beam in beams if beam.matcher is not None]
    return next((matcher.error for matcher in matchers if matcher.error is not None), None)


def _best_first(group: SequenceGroup) -> list[tuple[float, float, Hypothesis]]:
    """(score, log-probability, beam) of all that have ended, then of those that run if the search is not over."""
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
