"""Markdown that grows: whatever pieces it comes in, the widgets are those of the whole text."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.widget import Widget
from textual.widgets import Static

from ui.app import ChatApp
from ui.widgets.markdown import ModelMarkdown

TEXTS = {
    "paragraphs": "One line that is rather long, so that it is broken at the end.\n\nAnother *one*.\nA third.",
    "a list": "Three things:\n\n- the first\n- the **second**, which is broken into two lines\n- third\n\nEnd.",
    "nested lists": "- a\n  - b\n    1. c\n    2. d\n  - e\n- f\n\n  More of f.\n\n  ```py\n  x = 1\n  y\n  ```\n- g",
    "more than nine": "".join(f"{number}. item {number}\n" for number in range(7, 13)) + "\nand so on",
    "a list of one word": "1. x",
    "a list that becomes another": "* a\n* b\n- c\n- d\n1. e\n3. f",
    "code": "Do this:\n\n```python\nfor i in range(3):\n    print(i)  # " + "long " * 30 + "\n```\nDone.",
    "a quote in a list": "1. one\n\n   > in a quote\n2. two",
    "mixed": "# Title\n\n> quoted\n> more\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n---\n\n1. one\n2. two",
}


class Shown(App[None]):
    CSS_PATH = ChatApp.CSS_PATH

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield ModelMarkdown()


def texts(widget: Widget) -> Iterator[tuple[str, Region]]:
    """Every text below, and where it stands."""
    for child in widget.walk_children(Static):
        yield str(child.visual), child.region.translate(-widget.region.offset)


@pytest.mark.anyio
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("longest", [1, 7, 40])
async def test_pieces_give_what_the_whole_gives(name: str, longest: int) -> None:
    text, pieces = TEXTS[name], random.Random(f"{name} {longest}")
    app = Shown()
    async with app.run_test(size=(40, 60)) as pilot:
        growing = app.query_one(ModelMarkdown)
        at = 0
        while at < len(text):
            step = pieces.randint(1, longest)
            await growing.append_text(text[at : at + step])
            await pilot.pause()
            at += step
        at_once = ModelMarkdown(text)
        await growing.parent.mount(at_once)  # type: ignore[union-attr]
        await pilot.pause()
        assert list(texts(growing)) == list(texts(at_once))
        assert growing.size == at_once.size
