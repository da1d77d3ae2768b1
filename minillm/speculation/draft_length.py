"""Choose how many draft tokens to propose: the number that saves most time. If none saves time, pause for some steps.

The unit of time is the time of a step without draft tokens. A sequence's `DraftLength` is its current choice, which
adapts after each step.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

_MOST_DRAFTED = 8  # draft model tokens per step
_LARGEST_CREDIT = 2.0  # steps
_LONGEST_PAUSE = 64  # steps
_DRAFT_PAUSES = 4, 256  # shortest and longest, in steps; after a pause the draft model computes the missed tokens
_WORTH = 1.1  # minimum speedup to start drafting
_KEPT = 0.95  # decay of the counts of accepted and checked tokens per step


@dataclass(frozen=True)
class DraftCosts:
    """The costs of draft tokens, as fractions of the time of a step without draft tokens.

    Attributes:
        step: extra cost of a step that has draft tokens.
        each: extra cost of verifying each draft token.
        draft: extra cost of proposing each draft token.
        wait: extra cost of a step that waits for a lookup instead of running ahead.
        resumptions: how often to return to the source of drafts after the text has diverged from it. 0 if draft tokens
            are expensive.
        fewest, most: the minimum and maximum number of draft tokens that a lookup proposes. On a GPU, 5 to 8 rows take
            equal time, and so do 9 to 16.
    """

    step: float
    each: float
    draft: float = 0.0
    wait: float = 0.0
    resumptions: int = 0
    fewest: int = 3
    most: int = 8


class DraftLength(Protocol):
    """Decides how many draft tokens to propose for one sequence, and adapts after each step."""

    left: int  # remaining steps of the present pause

    @property
    def count(self) -> int:
        """Number of draft tokens to propose for the next step."""

    def is_due(self) -> bool:
        """Return whether this step may have draft tokens. During a pause, count down. Call this once per step."""

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt to the result of a step. ``num_drafted`` is 0 if the step waited for a lookup that found nothing."""


@dataclass(slots=True)
class LookupDraftLength:
    """The `DraftLength` for n-gram lookup: propose about as many draft tokens as were accepted recently."""

    costs: DraftCosts
    count: int = 0  # starts with `costs.fewest`
    credit: float = 0.0  # steps saved recently; below 0 a pause begins
    pause: int = 0  # steps of the last pause, halved by every step that saved time
    left: int = 0

    def __post_init__(self) -> None:
        self.count = self.count or self.costs.fewest

    def is_due(self) -> bool:
        if self.left:
            self.left -= 1
            return False
        return True

    def resumes(self, num_tries: int) -> bool:
        """Return whether to try a source again after a text has diverged from it and ``num_tries`` tries failed."""
        return self.credit > 0 and num_tries < self.costs.resumptions

    def update(self, num_drafted: int, num_accepted: int) -> None:
        costs = self.costs
        saved = num_accepted - costs.step - costs.each * num_drafted if num_drafted else -costs.wait
        self.credit = min(_LARGEST_CREDIT, self.credit + saved)
        if saved > 0:
            self.pause //= 2
        if self.credit < 0:
            self.credit = 0.0
            self.left = self.pause = min(_LONGEST_PAUSE, max(2, 2 * self.pause))
        if num_accepted < num_drafted:
            self.count = max(costs.fewest, num_accepted + 1)
        elif num_drafted:
            self.count = min(costs.most, 2 * self.count + 1)


@dataclass(slots=True)
class ModelDraftLength:
    """The `DraftLength` for a draft model: propose the number of tokens that saves most time.

    This number follows from the costs and the recent acceptance rate. The rate counts a draft token only if all draft
    tokens before it were accepted. If no number of tokens saves time, pauses grow, and after the longest pause drafting
    stops. If even an acceptance rate of 0.9 would hardly save time, drafting never starts, because the draft model
    would first have to compute the prompt.
    """

    costs: DraftCosts
    accepted: float = 3.0  # accepted draft tokens, with decay; the initial rate is three of four
    checked: float = 4.0  # draft tokens after accepted ones, with decay
    pause: int = 0  # steps of the last pause; 0 again once draft tokens save time
    left: int = 0

    def __post_init__(self) -> None:
        if max(self._speed(count, 0.9) for count in range(1, _MOST_DRAFTED + 1)) < _WORTH:
            self.left = sys.maxsize

    @property
    def count(self) -> int:
        return max(range(1, _MOST_DRAFTED + 1), key=self._speed)

    def is_due(self) -> bool:
        if self.left:
            self.left -= 1
            return False
        return True

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self.accepted = _KEPT * self.accepted + num_accepted
        self.checked = _KEPT * self.checked + min(num_accepted + 1, num_drafted)
        if self._speed(self.count) > 1:
            self.pause = 0 if num_accepted else self.pause
        else:
            shortest, longest = _DRAFT_PAUSES
            self.pause = max(shortest, self.pause // 2 if num_accepted == num_drafted else 4 * self.pause)
            self.left = self.pause if self.pause <= longest else sys.maxsize

    def _speed(self, count: int, rate: float | None = None) -> float:
        """Return the speedup of ``count`` draft tokens per step at an acceptance rate (by default, the recent rate)."""
        rate = self.accepted / self.checked if rate is None else rate
        tokens = sum(rate**number for number in range(count + 1))
        return tokens / (1 + self.costs.step + (self.costs.each + self.costs.draft) * count)
