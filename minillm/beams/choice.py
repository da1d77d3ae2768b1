"""What one search chooses among at one step, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.beams.search import BeamSearch, Candidate
from minillm.cache import BlockTable
from minillm.grammar.matcher import Matcher
from minillm.kernels import Search
from minillm.outputs import FinishReason, TokenLogprobs
from minillm.sequence import Sequence, SequenceGroup
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
    search: Search | None = None  # the rules of the only search, where the device can take its steps
    counted: BlockTable | None = None  # the first beam's, when its group's common blocks were counted

    @property
    def done(self) -> bool:
        return all(search.done for search in self.searches)


@dataclass
class Choice:
    """One search at one step: the rows of logits and the sequences of its beams, and properties of its candidates."""

    group: SequenceGroup
    rows: list[int]
    beams: list[Sequence]
    logprobs: dict[tuple[int, int], TokenLogprobs] = field(default_factory=dict)  # by row of logits and token
    texts: dict[tuple[int, int], OutputText] = field(default_factory=dict)  # by beam and token
    matchers: dict[tuple[int, int], Matcher] = field(default_factory=dict)  # likewise

    def __post_init__(self) -> None:
        self.end_ids = self.group.end_ids
        self.has_text = any(beam.text is not None for beam in self.beams)  # a search that is over has no beams

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
