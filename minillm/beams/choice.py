"""The state of a request's beam searches: running beams, the continuations of one step, and finished beams."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.beams.search import BeamSearch, Candidate
from minillm.cache import BlockTable
from minillm.grammar.matcher import Matcher
from minillm.outputs import FinishReason, TokenLogprobs
from minillm.runner.device.beams import DeviceSearch
from minillm.sequence import Sequence, SequenceGroup
from minillm.text.stop import OutputText


@dataclass
class Hypothesis:
    """The tokens and text of a finished beam, or a snapshot of a running one."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    text: OutputText | None  # None without stop strings: the tokens are then decoded only when the text is needed
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class BeamState:
    """The beam searches of one request: one search for each group of beams.

    ``beams`` has a list of running beams for each search, sorted with the best beam first.
    """

    searches: list[BeamSearch[Hypothesis]]
    beams: list[list[Sequence]] = field(default_factory=list)  # by search; empty before the first step
    search: DeviceSearch | None = None  # set if there is one search and the device can run its steps
    counted: BlockTable | None = None  # the first beam's table when its common blocks were last counted

    @property
    def done(self) -> bool:
        return all(search.done for search in self.searches)


@dataclass
class Choice:
    """One beam search in one step: the beams, each with its row of logits, and the continuations found so far.

    A continuation is a `Candidate`: a beam and its next token. Texts and grammar matchers of continuations are computed
    once and kept.
    """

    group: SequenceGroup
    rows: list[int]
    beams: list[Sequence]
    logprobs: dict[tuple[int, int], TokenLogprobs] = field(default_factory=dict)  # by row of logits and token
    texts: dict[tuple[int, int], OutputText] = field(default_factory=dict)  # by beam and token
    matchers: dict[tuple[int, int], Matcher] = field(default_factory=dict)  # by beam and token

    def __post_init__(self) -> None:
        self.end_ids = self.group.end_ids
        self.has_text = any(beam.text is not None for beam in self.beams)  # a finished search has no beams

    def text(self, candidate: Candidate) -> OutputText | None:
        """Return the text of a continuation, or None if the request has no stop strings."""
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
        """Return the grammar matcher after a continuation, or None without a grammar.

        If the grammar fails here, its error becomes the group's error.
        """
        before = self.beams[candidate.beam].matcher
        if before is None:
            return None
        key = candidate.beam, candidate.token_id
        if key not in self.matchers:
            self.matchers[key] = after = before.copy()
            if not self.beams[candidate.beam].reasons_with(candidate.token_id):
                after.advance(candidate.token_id, ends=candidate.token_id in self.end_ids)
            self.group.error = self.group.error or after.error
        return self.matchers[key]

    def token(self, candidate: Candidate) -> list[TokenLogprobs]:
        found = self.logprobs.get((self.rows[candidate.beam], candidate.token_id))
        return [] if found is None else [found]

    def ends(self, candidate: Candidate) -> bool:
        """Return whether a continuation is complete: by an end token, a stop string or the end of the grammar."""
        if candidate.token_id in self.end_ids:
            return True
        matcher = self.matcher(candidate)
        if matcher is not None and matcher.is_complete(self.end_ids):
            return True
        text = self.text(candidate) if self.has_text else None
        return text is not None and text.matched is not None

    def hypothesis(self, candidate: Candidate) -> Hypothesis:
        """Return a `Hypothesis` for a continuation that is complete or has reached the maximum length."""
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
