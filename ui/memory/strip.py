"""Draw the whole pool in a few lines. Each cell stands for many blocks."""

from itertools import groupby
from operator import itemgetter

from textual.content import Content

from minillm.ui.memory.pool import CACHED, FREE, OWNED, PINNED, SHARED, Memory
from minillm.ui.numbers import count, plural

_FILLED = "·⡀⣀⣄⣤⣦⣶⣷⣿"  # a cell's character if 0, 1, … 8 eighths of its blocks are not free
_OWNERS = ("$primary", "$success", "$warning", "$error", "$strand-4", "$strand-5", "$strand-6", "$strand-7")
_COLORS = {FREE: "$frame", CACHED: "$dim", PINNED: "$success", SHARED: "$secondary"}
_COLORS.update({OWNED + number: color for number, color in enumerate(_OWNERS)})


def strip(memory: Memory, width: int, height: int) -> Content:
    """Return a drawing of all blocks in order, in at most ``height`` lines of ``width`` cells, the scale included.

    The more of a cell's blocks are in use, the fuller is the cell. Its color shows the most important kind of block in
    it: shared, else owned, pinned, cached, or free.
    """
    pool = memory.pool
    if pool is None or height < 2 or not width:
        return Content("")
    height -= 1
    per_cell = max(1, -(-pool.num_blocks // (width * height)))
    cells = []
    for first in range(0, pool.num_blocks, per_cell):
        looks = pool.looks[first : first + per_cell]
        used = len(looks) - looks.count(FREE)
        cells.append((_FILLED[-(-8 * used // len(looks))], _COLORS[max(looks)]))
    lines = []
    for start in range(0, len(cells), width):
        runs = groupby(cells[start : start + width], key=itemgetter(1))
        lines.append(Content.assemble(*(("".join(mark for mark, _ in run), color) for color, run in runs)))
    words = f"all {plural(pool.num_blocks, 'block')}"
    if per_cell > 1:
        words += f", {count(per_cell)} to a cell"
    return Content("\n").join([*lines, Content.styled(words + " · F5 map", "$dim")])
