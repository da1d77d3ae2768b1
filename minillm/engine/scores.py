"""Prompt scores (the log-probabilities of a prompt's tokens), and the decoding method of prompt-only requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from minillm.engine.failures import fail_nan
from minillm.engine.requests import Requests
from minillm.outputs import CompletionOutput, Delta, PromptTokenLogprobs
from minillm.runner.scores import Scored
from minillm.sequence import Chunk, Schedule, Sequence, SequenceGroup


@dataclass(slots=True)
class Scoring:
    """The scores of prompt tokens (log-probabilities) that one step computes, as a `minillm.sequence.Flight`."""

    requests: Requests
    scored: Scored
    parts: list[tuple[SequenceGroup, range]]  # each group's scored prompt tokens, in the order of the step's chunks
    results: list[list[PromptTokenLogprobs]] = field(default_factory=list)
    may_run_ahead: bool = True
    may_compute_ahead: bool = True

    @classmethod
    def launched(cls, requests: Requests, scored: Scored, schedule: Schedule) -> Scoring:
        """Return a `Scoring` for a step that was just launched. It lists the prompt tokens that the step scores.

        Call this before `Engine.note_computed`.
        """
        parts = []
        for chunk in schedule.chunks:
            scores, first = chunk.group.scores, chunk.sequence.num_computed
            if scores is not None and (rows := scores.positions(first, first + chunk.count)):
                scores.next = rows.stop + 1
                parts.append((chunk.group, range(rows.start + 1, rows.stop + 1)))
        return cls(requests, scored, parts)

    @property
    def groups(self) -> list[SequenceGroup]:
        return [group for group, _ in self.parts]

    def wait(self) -> None:
        self.results = self.scored.wait()

    def conclude(self) -> list[Delta]:
        for (group, tokens), results in zip(self.parts, self.results, strict=True):
            if group.scores is not None and not group.finished:
                group.scores.tokens[tokens.start : tokens.stop] = results
                if any(each.logprob != each.logprob for each in results):
                    fail_nan(self.requests, group)
        return []

    def discard(self) -> None:
        self.parts = []


class ScoreOnly:
    """The decoding method of prompt-only requests, which end when their prompt is computed.

    It implements `minillm.sequence.Method`.
    """

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def begin(self, group: SequenceGroup) -> None:
        assert group.scores is not None

    def due(self, group: SequenceGroup) -> list[Chunk]:
        # Never a decode, even for one token: a token is drawn after every decode.
        return [Chunk(group, each, each.num_prompt_tokens - each.num_computed, False) for each in group.unfinished]

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        raise AssertionError("a prompt without an answer has nothing to fork")

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Ends:
        return Ends(self.requests, [chunk.group for chunk in chunks])

    def outputs(self, group: SequenceGroup) -> list[CompletionOutput]:
        logprobs: tuple[float | None, list | None] = (None, None) if group.params.logprobs is None else (0.0, [])
        return [CompletionOutput(each.index, "", [], *logprobs, each.finish_reason) for each in group.sequences]


@dataclass(slots=True)
class Ends:
    """The prompt-only requests that end with one step, as a `minillm.sequence.Flight`. No tokens are drawn for them."""

    requests: Requests
    groups: list[SequenceGroup]
    may_run_ahead: bool = True
    may_compute_ahead: bool = True

    def wait(self) -> None:
        """Return at once: no result from the device is needed."""

    def conclude(self) -> list[Delta]:
        deltas = []
        for group in self.groups:
            if group.error is None and not group.finished:
                self.requests.end_sequence(group, group.sequences[0], "length")
                deltas.append(Delta(group.request_id, 0, "", [], "length"))
        return deltas

    def discard(self) -> None:
        self.groups = []
