"""Choose the mounted part of a long list: the visible part and some screens around it. Plain arithmetic on lines.

A widget takes a thousand times the memory of its text, and more widgets make every layout slower. So a conversation of
any length has the widgets of a few screens, and blank space in place of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

AHEAD = 1.5  # screens mounted above and below the visible one
SPARE = 0.75  # remaining screens of them when more are mounted
_MOST = 5.0  # screens mounted while a conversation grows


def at(heights: Sequence[int], line: int) -> tuple[int, int]:
    """Return the item that contains a line, and the line's number within it. The last item contains all lines below."""
    for index, height in enumerate(heights):
        if line < height or index == len(heights) - 1:
            return index, line
        line -= height
    return 0, 0


def around(heights: Sequence[int], first: int, last: int) -> range:
    """Return the items that contain any of the lines from ``first`` up to, but not including, ``last``."""
    ends = list(accumulate(heights))
    held = [i for i, (end, height) in enumerate(zip(ends, heights, strict=True)) if end > first and end - height < last]
    return range(held[0], held[-1] + 1) if held else range(len(heights), len(heights))


def ending(heights: Sequence[int], room: float) -> range:
    """Return the last items: as many as fill ``room`` lines, at least one."""
    begin = len(heights)
    while begin and room > 0:
        begin -= 1
        room -= heights[begin]
    return range(begin, len(heights))


def grown(shown: range, heights: Sequence[int], screen: int) -> range:
    """Return the part to mount when items were added after ``shown``, which ended with the item before them."""
    longer = range(shown.start, len(heights))
    if sum(heights[each] for each in longer) <= _MOST * screen:
        return longer
    return ending(heights, (1 + AHEAD) * screen)
