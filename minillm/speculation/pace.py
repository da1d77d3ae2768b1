"""Choose the number of draft tokens to propose: as many as pay off, and none for a while if they do not.

Time is measured in steps that compute one token of the sequence.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

_MOST_DRAFTED = 8  # tokens of a draft model at a time
_LARGEST_CREDIT = 2.0
_LONGEST_PAUSE = 64  # steps
_DRAFT_PAUSES = 4, 256  # shortest and longest; the draft model computes their tokens afterwards
_WORTH = 1.1  # times as fast
_KEPT = 0.95  # decay of a draft model's counts per step


@dataclass(frozen=True)
class Price:
    """The costs of draft tokens, relative to a step without any.

    Attributes:
        step: of a step with draft tokens.
        each: of verifying each draft token.
        draft: of proposing each draft token.
        wait: of a step that waits for a lookup instead of running ahead.
        resumptions: how often a diverged text is expected to resume its source; 0 if draft tokens are expensive.
        fewest, most: draft tokens of a lookup. A GPU computes 5 to 8 rows in the same time, and 9 to 16.
    """

    step: float
    each: float
    draft: float = 0.0
    wait: float = 0.0
    resumptions: int = 0
    fewest: int = 3
    most: int = 8


class Pace(Protocol):
    """The pace of one sequence."""

    left: int  # further steps without draft tokens

    @property
    def count(self) -> int:
        """The draft tokens of the next step."""

    def is_due(self) -> bool:
        """Return whether this step may have draft tokens. Call it once a step."""

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt to a step; 0 draft tokens mean that it waited for a lookup in vain."""


@dataclass(slots=True)
class LookupPace:
    """The pace of n-gram lookup: propose about as many draft tokens as were accepted recently."""

    price: Price
    count: int = 0  # starts with the price's fewest
    credit: float = 0.0  # steps saved recently
    pause: int = 0  # steps of the last pause, fewer since something was saved
    left: int = 0

    def __post_init__(self) -> None:
        self.count = self.count or self.price.fewest

    def is_due(self) -> bool:
        if self.left:
            self.left -= 1
            return False
        return True

    def resumes(self, num_tries: int) -> bool:
        """Return whether to try again, after ``num_tries`` failures, that a text resumes its source."""
        return self.credit > 0 and num_tries < self.price.resumptions

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        price = self.price
        saved = num_accepted - price.step - price.each * num_drafted if num_drafted else -price.wait
        self.credit = min(_LARGEST_CREDIT, self.credit + saved)
        if saved > 0:
            self.pause //= 2
        if self.credit < 0:
            self.credit = 0.0
            self.left = self.pause = min(_LONGEST_PAUSE, max(2, 2 * self.pause))
        if num_accepted < num_drafted:
            self.count = max(price.fewest, num_accepted + 1)
        elif num_drafted:
            self.count = min(price.most, 2 * self.count + 1)


@dataclass(slots=True)
class DraftPace:
    """The pace of a draft model: propose as many tokens as save most time, by the recent rate of acceptance.

    A draft token counts if those before it were accepted. If none pays off, pauses grow, and after the longest one it
    stops. If even an acceptance rate of 0.9 would hardly pay off, it never starts: to find out, the draft model would
    have to compute the prompt.
    """

    price: Price
    right: float = 3.0  # accepted, with decay; starts at three of four
    tried: float = 4.0
    pause: int = 0  # steps of the last pause, shorter since draft tokens paid off
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

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        self.right = _KEPT * self.right + num_accepted
        self.tried = _KEPT * self.tried + min(num_accepted + 1, num_drafted)
        if self._speed(self.count) > 1:
            self.pause = 0 if num_accepted else self.pause
        else:
            shortest, longest = _DRAFT_PAUSES
            self.pause = max(shortest, self.pause // 2 if num_accepted == num_drafted else 4 * self.pause)
            self.left = self.pause if self.pause <= longest else sys.maxsize

    def _speed(self, count: int, rate: float | None = None) -> float:
        """Return tokens per plain step's time, at ``count`` draft tokens a step and an acceptance ``rate``."""
        rate = self.right / self.tried if rate is None else rate
        tokens = sum(rate**number for number in range(count + 1))
        return tokens / (1 + self.price.step + (self.price.each + self.price.draft) * count)
