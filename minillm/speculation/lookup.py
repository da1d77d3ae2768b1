"""N-gram lookup: find earlier occurrences of a text's last tokens, in any text, by hash chains as in LZ77.

Each pair of adjacent tokens links to its latest occurrence, and each occurrence links to the previous one of the same
pair. So a new token costs one entry, and a search visits a bounded number of occurrences in texts of any length.
"""

from dataclasses import dataclass

LONGEST_MATCH = 16  # maximum tokens to compare: texts that agree in 16 tokens mostly continue alike
_PLACES = 32  # latest occurrences of a pair that a search visits


@dataclass(slots=True)
class Source:
    """A position in a text. The tokens that follow are proposed as draft tokens for another text, or for this text."""

    text: list[int]
    place: int  # index of the first draft token
    num_tries: int = 0  # attempts to return to this source since the other text diverged from it

    def tokens(self, count: int, text: list[int]) -> tuple[int, ...]:
        """Return up to ``count`` draft tokens for ``text``: the tokens that follow this position.

        If this position is in ``text`` itself, fewer than ``count`` tokens may follow. Then repeat them, as if ``text``
        were periodic.
        """
        found = self.text[self.place : self.place + count]
        period = len(self.text) - self.place
        while found and self.text is text and len(found) < count:
            found.append(found[-period])
        return tuple(found)

    def part(self, num_accepted: int) -> None:
        """Record that the other text accepted only ``num_accepted`` draft tokens, and then got a different token.

        Afterwards, the texts may agree again. So move ``place`` past the draft token that was rejected. If a later
        attempt to return here gets no token accepted, ``place`` does not move. The other text has grown by one token
        since then, so the next attempt aligns the two texts differently.
        """
        if num_accepted or not self.num_tries:
            self.place += num_accepted + 1
            self.num_tries = 0


class Occurrences:
    """An index of all pairs of adjacent tokens in several texts. A text is a list of token ids, which may grow."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # a pair -> its latest occurrence
        self._before: list[int] = []  # for each occurrence, the previous one of the same pair, or -1
        self._texts: list[list[int]] = []  # for each occurrence, its text
        self._ends: list[int] = []  # for each occurrence, the index of its second token in that text

    def add(self, text: list[int], first: int, end: int) -> None:
        """Index the pairs of adjacent tokens in ``text`` with the second token at ``first`` to ``end`` (exclusive)."""
        latest, before = self._latest, self._before
        for place in range(max(1, first), end):
            pair = text[place - 1] << 32 | text[place]
            before.append(latest.get(pair, -1))
            latest[pair] = len(self._ends)
            self._texts.append(text)
            self._ends.append(place)

    def source(self, text: list[int]) -> Source | None:
        """Return the latest occurrence of the longest known suffix of ``text`` (two tokens or more), or None."""
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
    """Return how many last tokens of ``text`` equal the last tokens of ``other[: end + 1]``, at most `LONGEST_MATCH`.

    The caller must have checked that the last two tokens are equal.
    """
    most = min(LONGEST_MATCH, len(text), end + 1)
    length = 2
    while length < most and text[-1 - length] == other[end - length]:
        length += 1
    return length
