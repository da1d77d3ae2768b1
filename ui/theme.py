"""Two calm themes. Colours have meaning: blue is owned and alive, violet is shared, amber warns, red failed."""

from __future__ import annotations

import os
from typing import Any

from textual.theme import Theme

_COLOURS = {
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


def _theme(name: str, *, dark: bool) -> Theme:
    colours: dict[str, Any] = {part: shades[0 if dark else 1] for part, shades in _COLOURS.items()}
    blue, ground = colours["primary"], colours["background"]
    footer = {"footer-key-foreground": blue, "footer-background": ground}
    return Theme(name, accent=blue, dark=dark, variables=footer, **colours)


DARK, LIGHT = _theme("minillm-dark", dark=True), _theme("minillm-light", dark=False)


def preferred_theme(name: str = "") -> Theme:
    """The one called ``dark`` or ``light``; without a name by the background that the terminal reports in ``COLORFGBG``
    (rxvt, Konsole, iTerm2); dark where it is silent.
    """
    if name:
        return LIGHT if name == "light" else DARK
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background in ("7", "15") else DARK
