"""The picture of the README, and the recording of the tour."""

from __future__ import annotations

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lib.ui import ask, chat
from minillm.ui.demo import STOPS
from minillm.ui.recording import Frame, recording
from minillm.ui.screenshot import timeline

ROOT = Path(__file__).resolve().parents[2]


def text_of(svg: str) -> str:
    """Return the text of an SVG, with a space between its elements."""
    return html.unescape(re.sub(r"<[^>]*>", " ", svg)).replace("\xa0", " ")


def test_the_picture_shows_a_fork_that_is_shared() -> None:
    text = text_of((ROOT / "ui" / "picture.svg").read_text(encoding="utf-8"))
    assert "strands" in text
    assert re.search(r"blocks ×3", text), "three answers share blocks"
    assert "turn 2 · answer 3" in text


def test_the_recording_shows_all_stops_of_the_tour() -> None:
    svg = (ROOT / "ui" / "tour.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    text = " ".join(text_of(svg).split())
    for number in range(1, len(STOPS) + 1):
        assert f"{number}/{len(STOPS)} " in text
    assert "The tour is over" in text
    assert "did not happen" not in text
    seconds = re.search(r"animation:([\d.]+)s", svg)
    assert seconds is not None
    assert 20 <= float(seconds[1]) <= 40
    assert len(svg.encode()) < 1_500_000
    assert re.findall(r"https?:[^\"\s]*|<script|<image|url\(", svg) == ["http://www.w3.org/2000/svg"]


@pytest.mark.anyio
async def test_a_recording_shows_each_frame_in_its_time_and_a_row_of_both_once() -> None:
    async with chat(size=(100, 32)) as pilot:
        await ask(pilot, "echo <one> & two")
        first = pilot.app.export_screenshot(simplify=True)
        await ask(pilot, "echo later")
        second = pilot.app.export_screenshot(simplify=True)
    svg = recording([Frame(first, 1.0), Frame(second, 3.0), Frame(first, 1.0)], "a title", still=1)
    root = ElementTree.fromstring(svg)
    assert root.attrib["viewBox"] == ElementTree.fromstring(first).attrib["viewBox"]
    assert "animation:5s step-end infinite" in svg
    texts, hidden = {}, {}  # of the rows, by the times in which they are shown
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        if group.get("class") == "f":
            name = group.attrib["style"].removeprefix("animation-name:")
            keyframes = re.search(rf"@keyframes {name}\{{(.*)\}}", svg)
            assert keyframes is not None
            times = re.sub(r"\{visibility:(visible|hidden)\}", r" \1 ", keyframes[1]).strip()
            texts[times] = " ".join(group.itertext())
            hidden[times] = group.get("visibility") == "hidden"
    in_both, in_first, in_second = "0% visible", "0% visible 20% hidden 80% visible", "0% hidden 20% visible 80% hidden"
    assert hidden == {in_both: False, in_first: True, in_second: False}, "without animations, frame 1 is shown"
    assert "fake" in texts[in_both]
    assert "later" in texts[in_second]
    assert "later" not in texts[in_both] + texts[in_first]
    assert "a title" in svg


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_each_stop_of_a_recording_lasts_the_same_time(count: int) -> None:
    shots = [str(number) for number in range(count)]
    frames = timeline(shots)
    assert sum(frame.seconds for frame in frames) == pytest.approx(4.5)
    assert frames[0].svg == shots[0]
    assert frames[-1].svg == shots[-1]
    assert [int(frame.svg) for frame in frames] == sorted({int(frame.svg) for frame in frames})
    assert len(frames) <= 15
