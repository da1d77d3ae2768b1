"""The chat on a terminal with 16 colors, and without any."""

from __future__ import annotations

import re

import pytest
from textual.color import Color

from lib.terminal import session
from minillm.ui.themes import contrast

PALETTE = (
    (0, 0, 0), (170, 0, 0), (0, 170, 0), (170, 85, 0), (0, 0, 170), (170, 0, 170), (0, 170, 170), (170, 170, 170),
    (85, 85, 85), (255, 85, 85), (85, 255, 85), (255, 255, 85), (85, 85, 255), (255, 85, 255), (85, 255, 255),
    (255, 255, 255),
)  # fmt: skip
_STYLED = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)")


def colors(codes: list[int]) -> tuple[int | None, int | None]:
    """Return the colors of text and background, as numbers of the palette."""
    text = ground = None
    for code in codes:
        for first, number in ((30, 0), (90, 8)):
            if first <= code < first + 8:
                text = code - first + number
            elif first + 10 <= code < first + 18:
                ground = code - first - 10 + number
    return text, ground


@pytest.mark.parametrize("ground", ["0;15", "15;0"], ids=["light", "dark"])
def test_no_word_has_the_color_of_its_ground(ground: str) -> None:
    with session(environment={"TERM": "xterm", "COLORTERM": "", "COLORFGBG": ground}, size=(120, 40)) as running:
        running.wait_for("ready in")
        for theme in ("nord", "solarized-light", "monokai", "rose-pine-dawn", "dark" if ground == "15;0" else "light"):
            running.type(f"/theme {theme}\r")
            running.read(0.5)
        running.type("echo hello **world** `code`\r")
        running.wait_for("50.0 tok/s")
        running.type("/s")
        running.wait_for("/sessions")
        running.quit()
        assert running.end() == 0
    seen = 0
    for codes, words in _STYLED.findall(running.output.decode("utf-8", "replace")):
        assert "38;" not in codes, "more than 16 colors"
        text, below = colors([int(code) for code in codes.split(";") if code])
        if re.search(r"\w", words) and text is not None and below is not None:
            seen += 1
            assert contrast(Color(*PALETTE[text]), Color(*PALETTE[below])) > 3, (words, text, below)
    assert seen > 20
