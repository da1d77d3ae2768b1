"""The gutter: a column next to an answer that shows the state of the cache blocks that contain its tokens."""

from itertools import groupby

from textual.content import Content

from minillm.ui.chat.conversation import Answer
from minillm.ui.drawing import TextCanvas
from minillm.ui.memory.pool import NUM_COLORS, BlockState, Pool
from minillm.ui.textual_internals import Growing

# For each kind of block, its character in most rows, and in its first row. Shapes differ, for use without color.
_SHARED, _OWN, _FILLING = ("┃", "┣"), ("│", "├"), ("╎", "├")
_LOOKS = {BlockState.SHARED: _SHARED, BlockState.PINNED: _SHARED, BlockState.CACHED: _SHARED, BlockState.OWNED: _OWN}


class Gutter(Growing, TextCanvas):
    """Shows a vertical line for each cache block of an answer. The first line is the block of the answer's first token.

    The gutter is empty if the answer's blocks are freed.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(lambda width, height: gutter(self.pool, answer, max(1, height - self.num_blank)))
        self.pool: Pool | None = None
        self.num_blank = 0  # number of reserved lines below the text, which belong to no block

    def show(self, pool: Pool | None) -> None:
        """Show the current state of the answer's blocks in ``pool``."""
        self.pool = pool
        self.update()


def gutter(pool: Pool | None, answer: Answer, height: int) -> Content:
    """Return the gutter as a column of ``height`` rows.

    Each block gets an equal share of the rows. If there are more blocks than rows, each row shows one block, and some
    blocks are not shown. A thick line is a shared or cached block. A thin line is a block that only this answer uses. A
    dashed line is the block that is being filled.
    """
    tables = pool.tables_of(answer.request_id) if pool is not None else []
    if pool is None or not tables or tables[0].state == "swapped" or answer.time_to_first_token is None:
        return Content("\n" * (height - 1))
    table, first = tables[0], answer.num_prompt_tokens // pool.block_size
    looks = [_LOOKS.get(pool.state(block), _OWN) for block in table.blocks[first:]]
    if looks and answer.is_open:
        looks[-1] = _FILLING
    if not looks:
        return Content("\n" * (height - 1))
    rows = [row * len(looks) // height for row in range(height)]
    parts = []
    for number, group in groupby(rows):
        line, begin = looks[number]
        look = "$secondary" if looks[number] is _SHARED else f"$strand-{table.index % NUM_COLORS}"
        parts += [(begin, look), *((line, look) for _ in list(group)[1:])]
    return Content("\n").join(Content.styled(mark, look) for mark, look in parts)
