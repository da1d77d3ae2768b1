"""Themes: our own two and Textual's, with colors that are readable on every background they appear on.

If a color is too close to its background, it is blended towards white or black, as little as necessary. This also holds
for terminals with only 256 colors. Contrast is defined by WCAG 2.1, https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio.
"""

import itertools
import math
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from textual.color import Color
from textual.theme import Theme

from minillm.errors import UsageError
from minillm.user_config import THEMES

LEAST_TEXT, LEAST_FRAME = 4.5, 1.5  # minimum contrast of text, and of frames and marks
_LEAST_FOREGROUND = 8.0  # minimum contrast of normal text; it is higher so that faded text is still readable
_SPARE = 0.15  # additional contrast, because the terminal rounds colors
_GRAY, _HUE = 0.1, 1000.0  # a color with less saturation is a gray; weight of the hue relative to the RGB distance
_ALIKE = 55.0  # two colors with a smaller RGB distance look alike to people
_STEPS = (0, 95, 135, 175, 215, 255)
_CUBE = [Color(r, g, b) for r, g, b in itertools.product(_STEPS, repeat=3) if not r == g == b]  # of the 256 colors

# Colors have meanings. Blue: blocks of one owner, and anything that runs. Violet: shared. Amber: warning. Red: failed.
_COLORS = {
    "primary": ("#7fa8d1", "#2d6597"),
    "secondary": ("#b596d8", "#7a4bab"),
    "success": ("#8dbb8a", "#35743e"),
    "warning": ("#dcae5f", "#9a6200"),
    "error": ("#e0796c", "#b0352a"),
    "foreground": ("#d3dae1", "#2a2f35"),
    "background": ("#11151a", "#fcfbf8"),
    "surface": ("#171c22", "#f3f1eb"),
    "panel": ("#1f262e", "#e8e5dd"),
}  # dark, light
_MEANINGS = ("primary", "secondary", "success", "warning", "error")


def _own(name: str, *, dark: bool) -> Theme:
    colors: dict[str, Any] = {part: shades[0 if dark else 1] for part, shades in _COLORS.items()}
    return Theme(name, accent=colors["primary"], dark=dark, **colors)


@cache
def find_theme(name: str = "") -> Theme:
    """Return the theme with this name. Without a name, return light or dark, like the terminal's background.

    Raises:
        UsageError: there is no such theme.
    """
    name = name or terminal_background()
    if name in ("dark", "light"):
        return _own(f"minillm-{name}", dark=name == "dark")
    if name not in THEMES:
        near = get_close_matches(name, THEMES, 1)
        raise UsageError(
            f"no theme {name!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(THEMES)}")
        )
    from textual.theme import BUILTIN_THEMES  # here, because most starts need none of them

    return BUILTIN_THEMES[name]


# The colors are all among the 16 basic ones, so the terminal rounds none, and no text disappears in its background.
_SIXTEEN = {
    "primary": ("#55ffff", "#0000aa"),
    "secondary": ("#ff55ff", "#aa00aa"),
    "success": ("#55ff55", "#000000"),
    "warning": ("#ffff55", "#aa00aa"),
    "error": ("#ff5555", "#aa0000"),
    "foreground": ("#ffffff", "#000000"),
    "background": ("#000000", "#ffffff"),
    "surface": ("#000000", "#ffffff"),
    "panel": ("#000000", "#ffffff"),
}  # name of a color -> (in the dark theme, in the light theme)


def in_sixteen_colors(theme: Theme) -> Theme:
    """Return the theme to use instead of ``theme`` in a terminal with 16 colors.

    The result is a dark theme if ``theme`` is dark.
    """
    colors: dict[str, Any] = {part: shades[0 if theme.dark else 1] for part, shades in _SIXTEEN.items()}
    name = f"minillm-16-{'dark' if theme.dark else 'light'}"
    return Theme(name, accent=colors["primary"], dark=theme.dark, **colors)


def for_terminal(theme: Theme, colors: str | None, *, without_color: bool = False) -> Theme:
    """Return a readable variant of ``theme`` for a terminal.

    ``colors``: the terminal's color system, as Rich names it.
    """
    if colors == "standard":
        theme = in_sixteen_colors(theme)
    elif colors == "256":
        theme = in_gray_grounds(theme)
    if without_color:
        theme = in_grays(theme)
    # A terminal inside a terminal may report more colors than the outer one has.
    nested = os.environ.get("TERM", "").startswith(("tmux", "screen"))
    return legible(theme, {"256"} if colors == "256" else {"truecolor", "256"} if nested else {"truecolor"})


_GRAYS = [Color(gray, gray, gray) for gray in (0, *range(8, 239, 10), 255)]  # of the 256 colors, from dark to light


def _colors_of(theme: Theme) -> dict[str, Color]:
    """Return the colors of a theme by name. Textual derives the colors that the theme does not define."""
    shades = theme.to_color_system().generate()
    return {name: Color.parse(shades[name]) for name in (*_COLORS, "accent")}


def in_gray_grounds(theme: Theme) -> Theme:
    """Return the theme with different grays for its three backgrounds, for a terminal with 256 colors.

    The terminal itself would choose the most similar of the 256 colors: black for all dark backgrounds, and yellow for
    light ones.
    """
    colors = _colors_of(theme)
    before, found = -1 if theme.dark else len(_GRAYS), dict[str, str]()
    for name in ("background", "surface", "panel"):
        ground = colors[name]
        nearest = min(range(len(_GRAYS)), key=lambda at: abs(_luminance(_GRAYS[at]) - _luminance(ground)))
        before = max(nearest, before + 1) if theme.dark else min(nearest, before - 1)
        found[name] = _GRAYS[before].hex
    return replace(theme, **found)  # type: ignore[arg-type]


def in_grays(theme: Theme) -> Theme:
    """Return the theme with each color replaced by a gray.

    Textual also removes colors, but not from parts of the screen without a widget.
    """
    grays: dict[str, Any] = {name: color.monochrome.hex for name, color in _colors_of(theme).items()}
    return replace(theme, **grays)


def terminal_background() -> str:
    """Return ``light`` or ``dark``, from ``COLORFGBG`` (rxvt, Konsole, iTerm2).

    Without this variable, return ``dark``.
    """
    return "light" if os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15") else "dark"


def legible(theme: Theme, kinds: Set[str] = frozenset({"truecolor"})) -> Theme:
    """Return the theme with enough contrast, and with the additional color names that ``app.tcss`` uses.

    ``kinds``: the kinds of terminal in which the theme must be readable, "truecolor" and "256".
    """
    shades = {name: str(shade) for name, shade in theme.to_color_system().generate().items()}
    grounds = [Color.parse(shades[name]) for name in ("background", "surface", "panel")]
    ground = grounds[0]
    goal = Color(255, 255, 255) if theme.dark else Color(0, 0, 0)

    def text(color: Color, least: float = LEAST_TEXT, on: Sequence[Color] = grounds) -> str:
        return readable(color, on, goal, least, kinds).hex

    def distinct_color(color: Color) -> str:
        """Return a readable variant of a color that tells sequences apart.

        Such colors never appear on a panel. So they need less blending, and differ more from each other.
        """
        if kinds != {"256"} or color.hsl.s <= _GRAY:
            return text(color, on=grounds[:2])
        found = nearest_in_cube(color, grounds[:2], taken)
        taken.add(found)
        return found.hex

    taken: set[Color] = set()

    foreground = Color.parse(text(Color.parse(shades["foreground"]), _LEAST_FOREGROUND))
    names = ("primary", "success", "warning", "error")
    answers = [Color.parse(text(Color.parse(shades[name]), on=grounds[:2])) for name in names]

    def from_answers(shade: str) -> float:
        shown = Color.parse(text(Color.parse(shade), on=grounds[:2]))
        return min(_distance(shown, own) for own in answers)

    if from_answers(shades["secondary"]) < _ALIKE:  # shared blocks would look like blocks of a single answer
        ours = _COLORS["secondary"][0 if theme.dark else 1]
        shades["secondary"] = max(shades["secondary"], shades["accent"], ours, key=from_answers)
    colors = {name: distinct_color(Color.parse(shades[name])) for name in _MEANINGS}
    colors["accent"] = (
        colors["primary"] if shades["accent"] == shades["primary"] else distinct_color(Color.parse(shades["accent"]))
    )
    parsed = {name: Color.parse(each) for name, each in colors.items()}
    dim = text(ground.blend(foreground, 0.7))
    own, strands = [colors[name] for name in names], [parsed[name] for name in names]
    between = [one.blend(other, 0.5) for one, other in zip(strands, [*strands[1:], parsed["secondary"]], strict=True)]
    variables = {
        **theme.variables,
        **{f"text-{name}": text(color) for name, color in parsed.items()},
        **{f"strand-{number}": each for number, each in enumerate([*own, *map(distinct_color, between)])},
        "text": foreground.hex, "text-muted": dim, "text-disabled": dim, "dim": dim,
        "frame": text(ground.blend(foreground, 0.3), LEAST_FRAME),
        "footer-key-foreground": colors["primary"], "footer-background": ground.hex, "footer-foreground": dim,
    }  # fmt: skip
    return replace(
        theme, foreground=foreground.hex, variables=variables, background=ground.hex, surface=grounds[1].hex,
        panel=grounds[2].hex, **colors,  # type: ignore[arg-type]
    )  # fmt: skip


def readable(color: Color, grounds: Sequence[Color], goal: Color, least: float, kinds: Set[str]) -> Color:
    """Return the color, blended towards ``goal`` until its contrast on all backgrounds is at least ``least``.

    ``kinds``: see `legible`.
    """
    shows = [_SHOWN[kind] for kind in kinds]
    for step in range(21):
        blended = color.blend(goal, step / 20)
        if all(contrast(show(blended), show(ground)) >= least + _SPARE for ground in grounds for show in shows):
            return blended
    return goal


def nearest_in_cube(color: Color, grounds: Sequence[Color], taken: Set[Color]) -> Color:
    """Return the one of the 256 colors that is the most similar to ``color``.

    The result is readable on ``grounds``, not a gray, and not in ``taken``. For the similarity, the hue counts most.
    """

    def dissimilarity(other: Color) -> float:
        turn = abs(color.hsl.h - other.hsl.h)
        return _distance(color, other) ** 2 + (_HUE * min(turn, 1 - turn)) ** 2

    least = LEAST_TEXT + _SPARE
    legible = (each for each in _CUBE if each not in taken and all(contrast(each, on) >= least for on in grounds))
    return min(legible, key=dissimilarity)


def _distance(one: Color, other: Color) -> float:
    return math.dist(one.rgb, other.rgb)


@cache
def in_256_colors(color: Color) -> Color:
    """Return the one of the 256 standard colors that is nearest to ``color``."""
    from rich.color import Color as RichColor
    from rich.color import ColorSystem

    nearest = RichColor.from_rgb(*color.rgb).downgrade(ColorSystem.EIGHT_BIT).get_truecolor()
    return Color(*nearest)


_SHOWN: dict[str, Callable[[Color], Color]] = {"truecolor": lambda color: color, "256": in_256_colors}


def contrast(one: Color, other: Color) -> float:
    """Return the contrast of two colors, from 1 (equal) to 21 (black on white)."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@cache
def _luminance(color: Color) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
