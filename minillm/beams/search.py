"""Beam search: choose the continuations that survive, keep the finished ones, and decide when the search is done.

The semantics are those of Hugging Face ``generate`` (its vectorized ``_beam_search``). Each step considers the best
``(1 + number of end tokens) * width`` continuations. The best ``width`` of those without an end survive. Continuations
that end are kept as finished if they rank among the best ``width``. This is plain Python on numbers:
`minillm.beams.candidates` handles the tensors, and `minillm.beams.method` forks and frees the blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Beam = TypeVar("Beam")


@dataclass(frozen=True)
class Candidate:
    """A continuation of beam number ``beam`` by ``token_id``.

    ``logprob`` is the sum for all generated tokens of the beam, including this token.
    """

    logprob: float
    beam: int
    token_id: int


@dataclass(frozen=True)
class Finished(Generic[Beam]):
    """A finished beam, with its score and its log-probability, and the caller's record of it."""

    score: float
    logprob: float
    beam: Beam


@dataclass
class BeamSearch(Generic[Beam]):
    """The beam search of one request, or of one of its groups of beams.

    Log-probabilities are rounded to float32 and kept as Python floats.
    """

    width: int
    length_penalty: float
    early_stopping: bool | str
    max_tokens: int
    logprobs: list[float] = field(default_factory=lambda: [0.0])  # of the running beams, best first
    num_tokens: int = 0  # generated so far
    finished: list[Finished[Beam]] = field(default_factory=list)  # best first
    done: bool = False

    def num_candidates(self, num_end_tokens: int) -> int:
        """Return how many continuations to consider: enough that at least ``width`` do not end with an end token."""
        return max(2, 1 + num_end_tokens) * self.width

    def advance(
        self, candidates: Sequence[Candidate], ends: Callable[[Candidate], bool], keep: Callable[[Candidate], Beam]
    ) -> list[Candidate]:
        """Advance the search by one token.

        Args:
            candidates: the best continuations, best first. A banned continuation has log-probability -inf.
            ends: returns whether a continuation is complete, for example by a stop string. `advance` itself checks the
                length.
            keep: returns the caller's record of a finished continuation, for `Finished`.

        Returns:
            The running beams of the next step, best first; empty when the search is done.
        """
        self.num_tokens += 1
        full = self.num_tokens >= self.max_tokens
        running: list[Candidate] = []
        all_end = True
        for rank, candidate in enumerate(candidates):
            if candidate.logprob == float("-inf"):
                break
            if full or ends(candidate):
                if rank < self.width:
                    self._finish(candidate, keep)
            else:
                all_end = False
                if len(running) < self.width:
                    running.append(candidate)
        self.logprobs = [candidate.logprob for candidate in running]
        self.done = all_end or self._cannot_improve()
        return [] if self.done else running

    def _finish(self, candidate: Candidate, keep: Callable[[Candidate], Beam]) -> None:
        score = candidate.logprob / self.num_tokens**self.length_penalty
        if len(self.finished) == self.width and score <= self.finished[-1].score:
            return
        self.finished.append(Finished(score, candidate.logprob, keep(candidate)))
        self.finished.sort(key=lambda beam: -beam.score)  # stable: equal scores keep their order
        del self.finished[self.width :]

    def _cannot_improve(self) -> bool:
        if len(self.finished) < self.width or self.early_stopping is True:
            return len(self.finished) == self.width
        longest = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if longest else self.num_tokens
        return self.logprobs[0] / length**self.length_penalty <= self.finished[-1].score
