"""N-gram lookup: earlier occurrences of a text's last tokens, in it or in other texts, by hash chains as in LZ77.

Each pair of adjacent tokens links to its latest occurrence, and each occurrence to the previous one. So a new token
costs one entry, and a search visits a bounded number of places in texts of any length.
"""

from dataclasses import dataclass

LONGEST_MATCH = 16  # tokens to compare: texts with the same 16 tokens mostly continue alike
_PLACES = 32  # latest occurrences of a pair that a search visits


@dataclass(slots=True)
class Source:
    """A place in a text with tokens that may follow another text."""

    text: list[int]
    place: int  # of the first of them
    num_tries: int = 0  # since the text parted from this one

    def tokens(self, count: int, text: list[int]) -> tuple[int, ...]:
        """Return up to ``count`` tokens. If the source is ``text`` itself, assume that it keeps repeating itself."""
        found = self.text[self.place : self.place + count]
        period = len(self.text) - self.place
        while found and self.text is text and len(found) < count:
            found.append(found[-period])
        return tuple(found)

    def part(self, num_accepted: int) -> None:
        """Note that the text diverged after ``num_accepted`` of these tokens; it may resume after the next one.

        If it did not resume there, it may do so one token later.
        """
        if num_accepted or not self.num_tries:
            self.place += num_accepted + 1
            self.num_tries = 0


class Occurrences:
    """Pairs of tokens of growing texts, which are lists of token ids that others append to."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # a pair -> its latest occurrence
        self._before: list[int] = []  # of each occurrence, the one before it of the same pair, or -1
        self._texts: list[list[int]] = []  # of each occurrence, where it is
        self._ends: list[int] = []  # of each occurrence, the place of its second token

    def add(self, text: list[int], first: int, end: int) -> None:
        """Add the pairs of ``text`` with second tokens from ``first`` to ``end`` (exclusive)."""
        latest, before = self._latest, self._before
        for place in range(max(1, first), end):
            pair = text[place - 1] << 32 | text[place]
            before.append(latest.get(pair, -1))
            latest[pair] = len(self._ends)
            self._texts.append(text)
            self._ends.append(place)

    def source(self, text: list[int]) -> Source | None:
        """Return the latest occurrence of the longest suffix of ``text``; None if it has fewer than two tokens."""
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
    """Return how many tokens, up to `LONGEST_MATCH`, agree at the end of ``text`` and up to ``end`` of another."""
    most = min(LONGEST_MATCH, len(text), end + 1)
    length = 2
    while length < most and text[-1 - length] == other[end - length]:
        length += 1
    return length
