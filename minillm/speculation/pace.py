"""How many guesses a sequence makes, and when: as many as pay, and none for a while where they do not.

Time is counted in steps that compute one token of the sequence.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

_MOST_DRAFTED = 8  # guesses of a draft model at a time
_LARGEST_CREDIT = 2.0
_LONGEST_PAUSE = 64  # steps
_DRAFT_PAUSES = 4, 256  # the shortest and the longest, whose tokens the draft model computes when it is over
_WORTH = 1.1  # times as fast
_KEPT = 0.95  # of what a draft model's guesses have taught, from step to step


@dataclass(frozen=True)
class Price:
    """What guesses cost beyond a step without any.

    Attributes:
        step: of a step with guesses.
        each: of each guess, to verify it.
        draft: of each guess, to make it.
        wait: of a step that is not computed ahead of a lookup, where others are.
        resumptions: times that a text which has parted from what it repeated is expected to go on with it: where
            guesses cost much, none.
        fewest, most: guesses at a time that are looked up. A GPU computes 5 to 8 rows in one time, and 9 to 16.
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

    left: int  # steps without guesses that are to come

    @property
    def count(self) -> int:
        """The guesses of the next step."""

    def is_due(self) -> bool:
        """Whether this step may guess. To be asked once a step."""

    def judge(self, num_guessed: int, num_right: int) -> None:
        """Learn from a step, or with no guess from one that has waited for guesses in vain."""


@dataclass(slots=True)
class LookupPace:
    """Of guesses that are found: as many as were right lately, and fewer and fewer where few are."""

    price: Price
    count: int = 0  # the price's fewest to begin with
    credit: float = 0.0  # steps that guesses have saved lately
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
        """Whether to guess, again after so many wrong tries, that a text goes on with what it has parted from."""
        return self.credit > 0 and num_tries < self.price.resumptions

    def judge(self, num_guessed: int, num_right: int) -> None:
        price = self.price
        saved = num_right - price.step - price.each * num_guessed if num_guessed else -price.wait
        self.credit = min(_LARGEST_CREDIT, self.credit + saved)
        if saved > 0:
            self.pause //= 2
        if self.credit < 0:
            self.credit = 0.0
            self.left = self.pause = min(_LONGEST_PAUSE, max(2, 2 * self.pause))
        if num_right < num_guessed:
            self.count = max(price.fewest, num_right + 1)
        elif num_guessed:
            self.count = min(price.most, 2 * self.count + 1)


@dataclass(slots=True)
class DraftPace:
    """Of guesses that a draft model makes: as many as are expected to save most, by how many were right lately.

    A guess counts if those in front of it were right. Where none pays, pauses grow, and after the longest it has none.
    Where even nine right ones of ten would hardly pay, it has none from the beginning: to find that out, the draft
    model would have to compute the prompt.
    """

    price: Price
    right: float = 3.0  # guesses, fewer the longer ago; to begin with, three of four are taken to be right
    tried: float = 4.0
    pause: int = 0  # steps of the last pause, fewer since guesses paid
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

    def judge(self, num_guessed: int, num_right: int) -> None:
        self.right = _KEPT * self.right + num_right
        self.tried = _KEPT * self.tried + min(num_right + 1, num_guessed)
        if self._speed(self.count) > 1:
            self.pause = 0 if num_right else self.pause
        else:
            shortest, longest = _DRAFT_PAUSES
            self.pause = max(shortest, self.pause // 2 if num_right == num_guessed else 4 * self.pause)
            self.left = self.pause if self.pause <= longest else sys.maxsize

    def _speed(self, count: int, rate: float | None = None) -> float:
        """Tokens in the time of a step without guesses, at ``count`` guesses a step; ``rate``: of right ones."""
        rate = self.right / self.tried if rate is None else rate
        tokens = sum(rate**number for number in range(count + 1))
        return tokens / (1 + self.price.step + (self.price.each + self.price.draft) * count)
