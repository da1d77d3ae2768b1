"""Which part of a long list is mounted: the part in sight, and some screens around it. Plain arithmetic on lines.

A widget takes a thousand times the memory of its text, and a layout takes the longer the more widgets there are.
So a conversation of any length has the widgets of a few screens, and blank room in the place of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

AHEAD = 1.5  # screens that are mounted above and below the one in sight
SPARE = 0.75  # screens of them that are left when the next ones are mounted
_MOST = 5.0  # screens that are mounted while a conversation grows


def at(heights: Sequence[int], line: int) -> tuple[int, int]:
    """The item that holds a line, and the line's number within it; the last item holds all lines below."""
    for index, height in enumerate(heights):
        if line < height or index == len(heights) - 1:
            return index, line
        line -= height
    return 0, 0


def around(heights: Sequence[int], first: int, last: int) -> range:
    """The items that hold any of the lines from ``first`` to ``last``, this one excluded."""
    ends = list(accumulate(heights))
    held = [i for i, (end, height) in enumerate(zip(ends, heights, strict=True)) if end > first and end - height < last]
    return range(held[0], held[-1] + 1) if held else range(len(heights), len(heights))


def ending(heights: Sequence[int], room: float) -> range:
    """The last items: so many as fill ``room`` lines, one at least."""
    begin = len(heights)
    while begin and room > 0:
        begin -= 1
        room -= heights[begin]
    return range(begin, len(heights))


def grown(shown: range, heights: Sequence[int], screen: int) -> range:
    """The part that is mounted when items were added below ``shown``, which ended with the one before them."""
    longer = range(shown.start, len(heights))
    if sum(heights[each] for each in longer) <= _MOST * screen:
        return longer
    return ending(heights, (1 + AHEAD) * screen)
