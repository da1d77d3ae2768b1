"""Test that every theme is readable: the contrast of each character, with all colors and with 256."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.color import Color as RichColor
from textual.color import Color
from textual.command import CommandList
from textual.pilot import Pilot
from textual.screen import Screen

from lib.ui import answered, ask, chat, say, screen, until
from minillm.errors import UsageError
from minillm.service.messages import MemoryUse, TokenChoice
from minillm.ui.dialogs import ProbabilityScreen
from minillm.ui.help import HelpScreen
from minillm.ui.themes import LEAST_FRAME, LEAST_TEXT, contrast, find_theme, for_terminal, in_256_colors, readable
from minillm.user_config import THEMES

pytestmark = pytest.mark.anyio
KINDS = ("truecolor", "256")
DARK_GROUND = "#000000"  # stands for the terminal's own


def is_mark(text: str) -> bool:
    """Frames, bars, and points of blocks that are free: no letter or figure."""
    return all(0x2500 <= ord(character) <= 0x25FF or character in "·⋮ " for character in text)


def color_of(color: RichColor | None, otherwise: str) -> Color:
    return Color.parse(otherwise) if color is None or color.is_default else Color(*color.get_truecolor())


def words_of(pilot: Pilot[Any]) -> Iterator[tuple[str, Color, Color]]:
    """Yield every piece of text on the screen or in a dialog, with its color and background."""
    strips = pilot.app.screen._compositor.render_strips(pilot.app.size)
    boxes = [box.region for box in pilot.app.screen.query(".dialog, CommandInput, CommandList")]
    if boxes:  # all behind them is dim
        strips = [strip.crop(box.x, box.right) for box in boxes for strip in strips[box.y : box.bottom]]
    for strip in strips:
        for segment in strip:
            style = segment.style
            if segment.text.strip() and style is not None:
                ink, ground = color_of(style.color, "#ffffff"), color_of(style.bgcolor, DARK_GROUND)
                if style.dim:
                    ink = ground.blend(ink, 0.5)
                yield segment.text.strip(), *((ground, ink) if style.reverse else (ink, ground))


in_every_theme = pytest.mark.parametrize("in_all", [False, pytest.param(True, marks=pytest.mark.soak)])


async def faint(pilot: Pilot[Any], where: str, in_all: bool, views: Sequence[str] = ()) -> list[str]:
    """Return the unreadable texts in all themes, on terminals with all colors and with 256, in each of ``views``.

    Unless ``in_all``, each place tests every other theme, on one of the terminals. Views are tested together, because
    each change of theme restyles the whole chat.
    """
    found, app = [], screen(pilot).app
    update = app.stylesheet.update
    await until(pilot, lambda: any(words_of(pilot)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Screen, "_compositor_refresh", lambda _: None)  # nobody looks: it is drawn for `words_of` only
        # No screen below a dialog is looked at.
        patch.setattr(app.stylesheet, "update", lambda root, **_: root in app.screen_stack[:-1] or update(root))
        for (turn, kind), (number, name) in itertools.product(enumerate(KINDS), enumerate(THEMES)):
            if not in_all and (zlib.crc32(where.encode()) + number) % (2 * len(KINDS)) != turn:
                continue
            theme = for_terminal(find_theme(name), kind)
            app.register_theme(theme)
            app.theme = theme.name
            for place in views or [where]:
                if views:
                    screen(pilot).panel.view = place
                await pilot.pause()
                found += unread(pilot, place, name, kind)
    return found


def unread(pilot: Pilot[Any], place: str, theme: str, kind: str) -> list[str]:
    """Return the unreadable texts on the screen."""
    words, found = list(words_of(pilot)), []
    assert words, f"{place}, {theme}, {kind}"
    for text, *colors in words:
        ink, ground = map(in_256_colors, colors) if kind == "256" else colors
        measured = contrast(ink, ground)
        if measured < (LEAST_FRAME if is_mark(text) else LEAST_TEXT):
            found.append(f"{place}, {theme}, {kind}: {text[:30]!r} {ink.hex} on {ground.hex}: {measured:.2f}")
    return found


@in_every_theme
async def test_the_chat_pane_can_be_read_in_every_theme(in_all: bool) -> None:
    async with chat(size=(160, 50)) as pilot:
        await ask(pilot, "echo # A head\n\nA *word*, `code`, a [link](http://x.y)\n\n- one\n\n> said\n\n```python\n"
                  "def f(x):  # a comment\n    return 'text', 3\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")  # fmt: skip
        await pilot.press("alt+up")  # the turn is selected
        screen(pilot).chat_pane.notify("a notice")
        await say(pilot, "/wrong")
        found = await faint(pilot, "chat pane", in_all)
        await pilot.press("escape")
        await say(pilot, "/n 3")
        before = screen(pilot).chat_pane.conversation.leaf
        await say(pilot, "choose")
        await answered(pilot, before)
        found += await faint(pilot, "candidates", in_all)
        assert not found, "\n".join(found)


@in_every_theme
async def test_the_memory_can_be_read_in_every_theme(in_all: bool) -> None:
    async with chat(size=(160, 50)) as pilot:
        await ask(pilot, "echo one two three")
        pool = screen(pilot).pool
        assert pool is not None
        pool.use = MemoryUse(24 << 30, 12 << 30, 5 << 30, 4 << 30, 1 << 30)
        views = ("pool", "tables", "strands", "events", "memory", "steps")
        found = await faint(pilot, "memory", in_all, views)
        assert not found, "\n".join(found)


@in_every_theme
async def test_dialogs_can_be_read_in_every_theme(in_all: bool) -> None:
    choice = TokenChoice("a", -0.05, ["a", "b"], [-0.05, -3.0])
    unlikely = TokenChoice("c", -4.0, ["a", "b"], [-0.05, -3.0])
    async with chat(size=(120, 40)) as pilot:
        found = []
        for key in ("f1", "f2", "f3", "f4", "ctrl+o"):
            before = pilot.app.screen
            await pilot.press(key)
            await until(pilot, lambda before=before: pilot.app.screen is not before)  # type: ignore[misc]
            await pilot.pause()
            if key == "f1":
                assert isinstance(pilot.app.screen, HelpScreen)
            found += await faint(pilot, key, in_all)
            await pilot.press("escape")
            await until(pilot, lambda before=before: pilot.app.screen is before)  # type: ignore[misc]
        pilot.app.push_screen(ProbabilityScreen([choice, unlikely]))
        await pilot.pause()
        found += await faint(pilot, "probabilities", in_all)
        assert not found, "\n".join(found)


@in_every_theme
async def test_the_palette_can_be_read_in_every_theme(in_all: bool) -> None:
    """The palette takes the colors of the theme when it opens."""
    async with chat(size=(120, 40)) as pilot:
        found, app, below = [], pilot.app, pilot.app.screen
        for (turn, kind), (number, name) in itertools.product(enumerate(KINDS), enumerate(THEMES)):
            if not in_all and number % 4 != turn:
                continue
            theme = for_terminal(find_theme(name), kind)
            app.register_theme(theme)
            app.theme = theme.name
            await pilot.press("ctrl+p")
            await until(pilot, lambda: any(commands.option_count for commands in app.screen.query(CommandList)))
            await pilot.pause()
            found += unread(pilot, "palette", name, kind)
            box = app.screen.query_one(CommandList).region
            rows = app.screen._compositor.render_strips(app.size)[box.y + 1 :]  # behind a line that is blank
            styles = [next(iter(rows[at].crop(box.x))).style for at in (0, 2)]
            chosen, other = (None if style is None else style.bgcolor for style in styles)
            assert chosen != other, f"{name}, {kind}: nothing shows which is chosen"
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is below)
        assert not found, "\n".join(found)


def test_a_theme_is_found_by_its_name_or_named() -> None:
    assert find_theme("nord").dark
    assert not find_theme("light").dark
    with pytest.raises(UsageError, match="did you mean nord"):
        find_theme("nrod")
    with pytest.raises(UsageError, match="known: dark, light"):
        find_theme("zzzzzz")


def test_the_terminal_says_light_or_dark(monkeypatch: pytest.MonkeyPatch) -> None:
    for background, is_dark in (("0;15", False), ("15;0", True), ("", True)):
        monkeypatch.setenv("COLORFGBG", background)
        find_theme.cache_clear()
        assert find_theme().dark == is_dark


@pytest.mark.parametrize("name", THEMES)
def test_with_256_colors_the_grounds_are_grays_that_differ(name: str) -> None:
    theme = for_terminal(find_theme(name), "256")
    grounds = [in_256_colors(Color.parse(each)) for each in (theme.background, theme.surface, theme.panel)]
    assert len(set(grounds)) == 3
    assert all(ground.r == ground.g == ground.b for ground in grounds)


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("kind", ["truecolor", "256"])
def test_what_is_shared_and_four_answers_have_colors_that_differ(kind: str, name: str) -> None:
    theme = for_terminal(find_theme(name), kind)
    parts = (theme.primary, theme.secondary, theme.success, theme.warning, theme.error)
    colors = [Color.parse(str(each)) for each in parts]
    shown = [in_256_colors(each) if kind == "256" else each for each in colors]
    assert len(set(shown)) == 5
    strands = [theme.variables[f"strand-{number}"] for number in range(4)]
    assert strands == [theme.primary, theme.success, theme.warning, theme.error], "cards, strands and maps agree"
    if kind == "256":
        assert shown == colors, "nothing is left to be rounded"


@pytest.mark.parametrize("name", THEMES)
def test_people_tell_shared_blocks_from_those_of_an_answer(name: str) -> None:
    """In nord the shared strand and the first candidate once had similar light blues, 35 apart."""
    theme = for_terminal(find_theme(name), "truecolor")
    shared, *own = (Color.parse(str(each)) for each in
                    (theme.secondary, theme.primary, theme.success, theme.warning, theme.error))  # fmt: skip
    assert min(math.dist(shared.rgb, each.rgb) for each in own) > 40


def test_in_another_terminal_colors_are_legible_with_256_of_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def least() -> float:
        theme = for_terminal(find_theme("nord"), "truecolor")
        ink, ground = (in_256_colors(Color.parse(each)) for each in (theme.primary, str(theme.surface)))
        return contrast(ink, ground)

    monkeypatch.setenv("TERM", "xterm-256color")
    assert least() < LEAST_TEXT
    monkeypatch.setenv("TERM", "tmux-256color")
    assert least() > LEAST_TEXT


@pytest.mark.parametrize("name", ["nord", "light"])
@pytest.mark.parametrize("kind", ["truecolor", "256", "standard"])
def test_without_color_the_theme_is_gray(name: str, kind: str) -> None:
    theme = for_terminal(find_theme(name), kind, without_color=True)
    for color in (theme.background, theme.surface, theme.panel, theme.foreground, theme.primary, theme.error):
        assert len(set(Color.parse(str(color)).rgb)) == 1


def test_contrast_is_that_of_wcag() -> None:
    black, white, gray = Color(0, 0, 0), Color(255, 255, 255), Color(118, 118, 118)
    assert contrast(black, white) == contrast(white, black) == pytest.approx(21)
    assert contrast(gray, white) == pytest.approx(4.54, abs=0.01)
    assert contrast(gray, gray) == 1


def test_a_color_moves_no_further_than_it_must() -> None:
    ground, white = Color(0, 0, 0), Color(255, 255, 255)
    assert readable(Color(200, 200, 200), [ground], white, 4.5, {"256"}) == Color(200, 200, 200)
    moved = readable(Color(40, 40, 40), [ground], white, 4.5, {"truecolor"})
    assert 4.5 < contrast(moved, ground) < 7
