"""Two calm themes. Colours have meaning: blue is owned and alive, violet is shared, amber warns, red failed."""

from __future__ import annotations

import os

from textual.theme import Theme

DARK = Theme(
    name="minillm-dark",
    primary="#7fa8d1",
    secondary="#b596d8",
    accent="#7fa8d1",
    success="#8dbb8a",
    warning="#dcae5f",
    error="#e0796c",
    foreground="#d3dae1",
    background="#11151a",
    surface="#171c22",
    panel="#1f262e",
    dark=True,
    variables={"footer-key-foreground": "#7fa8d1", "footer-background": "#11151a"},
)

LIGHT = Theme(
    name="minillm-light",
    primary="#2d6597",
    secondary="#7a4bab",
    accent="#2d6597",
    success="#35743e",
    warning="#9a6200",
    error="#b0352a",
    foreground="#2a2f35",
    background="#fcfbf8",
    surface="#f3f1eb",
    panel="#e8e5dd",
    dark=False,
    variables={"footer-key-foreground": "#2d6597", "footer-background": "#fcfbf8"},
)


def preferred_theme(name: str = "") -> Theme:
    """The one called ``dark`` or ``light``; without a name by the background that the terminal reports in ``COLORFGBG``
    (rxvt, Konsole, iTerm2); dark where it is silent.
    """
    if name:
        return LIGHT if name == "light" else DARK
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background in ("7", "15") else DARK
