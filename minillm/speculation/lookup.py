"""Where the last tokens of a text occurred before, in it or in others: an index in the manner of LZ77's hash chains.

Each pair of neighbouring tokens knows its latest occurrence, and each occurrence the one before it. So a token costs
one entry when it comes, and a search looks at a bounded number of places, however long the texts are.
"""

from dataclasses import dataclass

LONGEST_MATCH = 16  # tokens that are compared: who agrees in so many mostly goes on alike
_PLACES = 32  # the latest occurrences of a pair that a search looks at


@dataclass(slots=True)
class Source:
    """Where the tokens that may follow a text are read."""

    text: list[int]
    place: int  # of the first of them
    num_tries: int = 0  # since the text parted from this one

    def tokens(self, count: int, text: list[int]) -> tuple[int, ...]:
        """Up to ``count`` tokens. Where they are read in ``text`` itself, it is taken to go on repeating itself."""
        found = self.text[self.place : self.place + count]
        period = len(self.text) - self.place
        while found and self.text is text and len(found) < count:
            found.append(found[-period])
        return tuple(found)

    def part(self, num_right: int) -> None:
        """Note that the text has another token behind ``num_right`` of those here: after it, it may go on as this one.

        Where it has not gone on so, it may do so one token later.
        """
        if num_right or not self.num_tries:
            self.place += num_right + 1
            self.num_tries = 0


class Occurrences:
    """The pairs of tokens of some growing texts. Texts are lists of token ids that others append to."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # a pair -> its latest occurrence
        self._before: list[int] = []  # of each occurrence, the one before it of the same pair, or -1
        self._texts: list[list[int]] = []  # of each occurrence, where it is
        self._ends: list[int] = []  # of each occurrence, the place of its second token

    def add(self, text: list[int], first: int, end: int) -> None:
        """Note the pairs of ``text`` whose second tokens stand from ``first`` to ``end`` (exclusive)."""
        latest, before = self._latest, self._before
        for place in range(max(1, first), end):
            pair = text[place - 1] << 32 | text[place]
            before.append(latest.get(pair, -1))
            latest[pair] = len(self._ends)
            self._texts.append(text)
            self._ends.append(place)

    def source(self, text: list[int]) -> Source | None:
        """Where the longest end of ``text`` occurred, the latest such place; None unless two tokens agree at least."""
        if len(text) < 2:
            return None
        found, longest = -1, 0
        number = self._latest.get(text[-2] << 32 | text[-1], -1)
        for _ in range(_PLACES):
            if number < 0:
                break
            other, end = self._texts[number], self._ends[number]
            if end + 1 < len(other):
                length = _common_end(text, other, end)
                if length > longest:
                    found, longest = number, length
                    if length >= LONGEST_MATCH:
                        break
            number = self._before[number]
        return None if found < 0 else Source(self._texts[found], self._ends[found] + 1)


def _common_end(text: list[int], other: list[int], end: int) -> int:
    """How many tokens, of `LONGEST_MATCH` at most, agree before the end of ``text`` and at place ``end`` of another."""
    most = min(LONGEST_MATCH, len(text), end + 1)
    length = 2
    while length < most and text[-1 - length] == other[end - length]:
        length += 1
    return length
