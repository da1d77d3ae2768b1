"""Test growing Markdown: in any pieces, the widgets are those of the whole text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode
from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from lib.ui import seen
from minillm.ui.app import ChatApp
from minillm.ui.chat.markdown import ModelMarkdown, plain_texts
from minillm.ui.themes import find_theme, for_terminal

TEXTS = {
    "paragraphs": "One line that is rather long, so that it is broken at the end.\n\nAnother *one*.\nA third.",
    "a list": "Three things:\n\n- the first\n- the **second**, which is broken into two lines\n- third\n\nEnd.",
    "nested lists": "- a\n  - b\n    1. c\n    2. d\n  - e\n- f\n\n  More of f.\n\n  ```py\n  x = 1\n  y\n  ```\n- g",
    "more than nine": "".join(f"{number}. item {number}\n" for number in range(7, 13)) + "\nand so on",
    "a list of one word": "1. x",
    "a list that becomes another": "* a\n* b\n- c\n- d\n1. e\n3. f",
    "code": "Do this:\n\n```python\nfor i in range(3):\n    print(i)  # " + "long " * 30 + "\n```\nDone.",
    "a quote in a list": "1. one\n\n   > in a quote\n2. two",
    "formulas": "So \\( a\\,b \\):\n\n\\[\n\\frac{a}{b}\n- c\\,d\n\\]\nand $$x$$.\n\n$$\ny_1 * z_1\n$$\nend",
    "code without a fence": "Do this:\ndef f(a):\n    if a:\n        return 1\n\n    return __name__\n\nThen `f`.",
    "aligned columns": "| left | middle | right |\n|:-|:-:|-:|\n|1|2|3|\n| longer words | 55 | 66 |\n| 7 | 8 | 9 |",
    "a table that ends without an empty line": "| a | b |\n|---|---|\n| 1 | 2 |\n1. one\n2. two",
    "a table of a heading": "| a | b |\n|---|---|\n2. two\n\nEnd.",
    "mixed": "# Title\n\n> quoted\n> more\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n---\n\n1. one\n2. two",
}


class Shown(App[None]):
    CSS_PATH = ChatApp.CSS_PATH

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return for_terminal(find_theme("dark"), "truecolor").variables

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield ModelMarkdown()


_SHORT = 100  # characters, one by one


def texts(widget: Widget) -> Iterator[tuple[str, Region]]:
    """Return every text below the widget, and its region."""
    for child in widget.walk_children(Static):
        yield str(child.visual), child.region.translate(-widget.region.offset)


@pytest.mark.anyio
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("longest", "lines_ahead"), [(1, 0), (40, 0), (7, 3)])
async def test_pieces_give_what_the_whole_gives(
    name: str, longest: int, lines_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, pieces = TEXTS[name], random.Random(f"{name} {longest}")
    if longest == 1:
        text = text[:_SHORT]
    app = Shown()
    monkeypatch.setattr(Screen, "_compositor_refresh", lambda _: None)  # laid out, and not drawn
    async with app.run_test(size=(40, 60)) as pilot:
        growing = app.query_one(ModelMarkdown)
        at = 0
        while at < len(text):
            step = pieces.randint(1, longest)
            await growing.append_text(text[at : at + step], lines_ahead)
            if pieces.random() < 0.4:
                await pilot.pause(0)  # laid out, and no longer
            at += step
        growing.end()
        await pilot.pause()
        at_once = ModelMarkdown(text)
        await growing.parent.mount(at_once)  # type: ignore[union-attr]
        await pilot.pause()
        assert list(texts(growing)) == list(texts(at_once))
        assert growing.size == at_once.size
        first, last = at_once.children[0], at_once.children[-1]
        assert (first.region.y, last.region.bottom) == (at_once.region.y, at_once.region.bottom), "an empty line"


@pytest.mark.parametrize(
    "text",
    [
        r"Let \( a\,b \), \(x_1 * y_1\) and $a_1*b*c$ cost $5 and $10; C:\dir\x",
        "see __init__.py, __name__, __main__.py, 2*3*4, 2**n**2, f(a*b*c), snake_case_name and $HOME",
        "\\[\n\\frac{a}{b}\n= c\\,d\n- e\n\\]",
        "\\begin{aligned}\na &= b \\\\\n+ c\n\\end{aligned}",
        "$$ x\\_y \\{z\\} $$",
        "\\[ x \\] is a sentence \\\\ still, and \\( unclosed \\, too",
        'def add(a, b):\n    """Add."""\n    if a:\n        return a\n\n    return a + b',
        "for (;;) {\n    x();\n} else {\n    y();\n}",
        "class A:\n    def __init__(self):\n        self.__x__ = 1",
    ],
)
def test_formulas_names_and_code_are_drawn_as_written(text: str) -> None:
    assert plain_texts(text) == [text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            r"\*no\* **bold** *it* __two words__ 1\. \_x\_ 这是**重点**内容",
            "*no* bold it two words 1. _x_ 这是重点内容",
        ),
        ("if you like:\n- a", "if you like:|a"),
        ("for me:\n  it is", "for me:\nit is"),
        ("- def f(x):\n      return x\n- b", "def f(x):\n    return x|b"),
        ("$$\nnever closed\n\n*text*", "$$\nnever closed|text"),
        ("def f():\n    x\nso *it* is", "def f():\n    x|so it is"),
    ],
)
def test_markdown_stays_markdown(text: str, shown: str) -> None:
    assert "|".join(plain_texts(text)) == shown


@pytest.mark.anyio
@pytest.mark.parametrize("step", [7, 1000])
async def test_columns_are_aligned_as_the_second_line_says(step: int) -> None:
    app = Shown()
    async with app.run_test(size=(60, 30)) as pilot:
        text, markdown = TEXTS["aligned columns"], app.query_one(ModelMarkdown)
        for at in range(0, len(text), step):
            await markdown.append_text(text[at : at + step])
        await pilot.pause()
        rows = [line.strip()[1:-1].split("│") for line in seen(pilot).splitlines() if line.count("│") == 4]
        assert [cells[0].strip() for cells in rows] == ["left", "1", "longer words", "7"]
        for left, middle, right in rows:
            spaces = [len(cell) - len(cell.lstrip()) for cell in (left, middle, right)]
            after = [len(cell) - len(cell.rstrip()) for cell in (left, middle, right)]
            assert spaces[0] == 1
            assert abs(spaces[1] - after[1]) <= 1
            assert after[2] == 1
        assert len({len("│".join(row)) for row in rows}) == 1


@pytest.mark.anyio
async def test_lines_ahead_are_there_before_they_are_needed_and_go_with_the_paragraph() -> None:
    app = Shown()
    async with app.run_test(size=(40, 60)) as pilot:
        markdown = app.query_one(ModelMarkdown)

        async def heights_after(text: str) -> list[int]:
            await markdown.append_text(text, 3)
            await pilot.pause()
            return [block.content_size.height for block in markdown.children]

        assert await heights_after("A word") == [4]
        assert await heights_after(" and many more words until there are" * 3) == [4], "lines 2, 3 and 4 were there"
        assert await heights_after(" and many more words until there are" * 2) == [8], "the fifth, and three more"
        assert await heights_after("\n\nThe next.") == [5, 4]
        markdown.end()
        await pilot.pause()
        assert [block.content_size.height for block in markdown.children] == [5, 1]


@pytest.mark.anyio
async def test_what_stands_below_a_growing_paragraph_is_shown_in_a_line_that_it_has_taken_ahead() -> None:
    app = Shown()
    async with app.run_test(size=(40, 60)) as pilot:
        markdown = app.query_one(ModelMarkdown)
        await markdown.append_text("A word", 3)
        assert markdown.show_below("1 token") == 3, "before it has its place, too"
        await pilot.pause()
        lines = [line.rstrip() for line in seen(pilot).splitlines()]
        assert lines[:3] == ["A word", "1 token", ""]
        await markdown.append_text(" and many more words until there are" * 4, 3)
        assert markdown.show_below("9 tokens") == 0, "all lines are full"
        await markdown.append_text("\n\n- an item", 3)
        await pilot.pause()
        assert markdown.show_below("9 tokens") == 0, "a list takes none ahead"
        assert "token" not in seen(pilot)
        assert [block.content_size.height for block in markdown.children] == [4, 1]


@pytest.mark.anyio
async def test_a_new_block_changes_nothing_of_those_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Shown()
    async with app.run_test(size=(40, 60)) as pilot:
        markdown = app.query_one(ModelMarkdown)
        await markdown.append_text("".join(f"## Part {number}\n\nText.\n\n- one\n- two\n\n" for number in range(5)))
        await pilot.pause()
        above, styled = set(markdown.walk_children()), set()
        apply = Stylesheet.apply

        def record(self: Stylesheet, node: DOMNode, **options: Any) -> None:
            styled.add(node)
            apply(self, node, **options)

        monkeypatch.setattr(Stylesheet, "apply", record)
        await markdown.append_text("One more.\n\nAnd another.")
        await pilot.pause()
        assert len(markdown.children) == 17
        assert set(markdown.children[15:]) <= styled
        assert not styled & above
