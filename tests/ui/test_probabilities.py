"""The dialog of an answer's tokens and their probabilities."""

from __future__ import annotations

import random
from functools import partial

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from lib.ui import chat, seen, until
from minillm.service.messages import TokenChoice
from minillm.ui.dialogs import ProbabilityScreen

pytestmark = pytest.mark.anyio


def cursor_text(pilot: Pilot[None]) -> str:
    """Return the text on the screen in reverse colors, as the cursor's."""
    lines = pilot.app.screen._compositor.render_strips(pilot.app.size)
    return "".join(each.text for strip in lines for each in strip if each.style and each.style.reverse)


@pytest.mark.parametrize("size", [(80, 24), (50, 16)])
@pytest.mark.parametrize("letters", ["世界你好天地玄黄宇宙洪荒", "abcdefgh"])
async def test_the_cursor_stays_in_sight_in_a_long_answer(letters: str, size: tuple[int, int]) -> None:
    draw, gap = random.Random(1), " " * letters.isascii()
    words = [gap + "".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(400)]
    async with chat(size=size) as pilot:
        dialog = ProbabilityScreen([TokenChoice(word, -0.1, ["a", "b"], [-1.0, -2.0]) for word in words])
        pilot.app.push_screen(dialog)
        await until(pilot, lambda: words[0].strip() in cursor_text(pilot))
        for at in (90, 200, 310, 399, 150):
            dialog._go_to(at)
            word = words[at].strip()
            await until(pilot, partial(lambda word: word in cursor_text(pilot), word))


async def test_figures_of_wide_characters_are_in_their_column() -> None:
    async with chat() as pilot:
        pilot.app.push_screen(ProbabilityScreen([TokenChoice("界", -0.1, ["a", "世界" * 20], [-1.0, -2.0])]))

        def figures() -> list[str]:
            return [line for line in seen(pilot).splitlines() if "▰" in line]

        await until(pilot, lambda: len(figures()) == 3)
        assert len({cell_len(line[: line.index("%")]) for line in figures()}) == 1
