"""The picture of the README."""

from __future__ import annotations

import html
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_shows_a_fork_that_is_shared() -> None:
    svg = (ROOT / "ui" / "picture.svg").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]*>", " ", svg)).replace("\xa0", " ")
    assert "strands" in text
    assert re.search(r"blocks ×3", text), "three answers share blocks"
    assert "turn 2 · answer 3" in text
