"""Choose the mounted items of a long list: the visible items, and the items of a few screens above and below.

A widget takes a thousand times the memory of its text, and more widgets make every layout slower. So a conversation of
any length has widgets only for a few screens, and blank space in place of all other items. The functions take the
heights of all items in lines, and return ranges of item indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

AHEAD = 1.5  # number of screens to mount above the visible one, and below it
SPARE = 0.75  # mount more if fewer screens than this remain above or below
_MOST = 5.0  # maximum screens that stay mounted while a conversation grows


def at(heights: Sequence[int], line: int) -> tuple[int, int]:
    """Return the index of the item that contains ``line``, and the line's number within it.

    The last item also contains all lines below it.
    """
    for index, height in enumerate(heights):
        if line < height or index == len(heights) - 1:
            return index, line
        line -= height
    return 0, 0


def around(heights: Sequence[int], first: int, last: int) -> range:
    """Return the indices of the items that contain any of the lines from ``first`` to ``last - 1``."""
    ends = list(accumulate(heights))
    held = [i for i, (end, height) in enumerate(zip(ends, heights, strict=True)) if end > first and end - height < last]
    return range(held[0], held[-1] + 1) if held else range(len(heights), len(heights))


def ending(heights: Sequence[int], num_lines: float) -> range:
    """Return the indices of the last items that together fill ``num_lines`` lines.

    The result contains at least one item if the list has any.
    """
    begin = len(heights)
    while begin and num_lines > 0:
        begin -= 1
        num_lines -= heights[begin]
    return range(begin, len(heights))


def grown(shown: range, heights: Sequence[int], screen: int) -> range:
    """Return the indices of the items to mount after items were added to the end of the list.

    ``shown`` are the indices of the items that were mounted before. They ended with the list's last item at that time.
    ``screen`` is the screen's height in lines.
    """
    longer = range(shown.start, len(heights))
    if sum(heights[each] for each in longer) <= _MOST * screen:
        return longer
    return ending(heights, (1 + AHEAD) * screen)
