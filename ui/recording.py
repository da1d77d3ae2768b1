"""Join screenshots of the app into an animated SVG, which plays in a Markdown page without scripts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from xml.etree import ElementTree

from rich.cells import cell_len

_SVG = "{http://www.w3.org/2000/svg}"
# The geometry of Rich's exporter, in pixels.
_CELL = 12.2
_ROW = 24.4
_RECT_TOP = 1.5  # distance from a row's top to its background
_TEXT_TOP = 20.0  # distance from a row's top to the baseline of its text
_FONTS = "Fira Code,ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"

_DOCUMENT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
text{{font:20px {fonts}}}
.t{{font:bold 18px arial}}
.f rect{{shape-rendering:crispEdges}}
.f{{animation:{seconds}s step-end infinite}}
@media(prefers-reduced-motion:reduce){{.f{{animation:none!important}}}}
{styles}
{keyframes}
</style>
<rect fill="#292929" width="{width}" height="{height}" rx="8"/>
<text class="t" fill="#c5c8c6" text-anchor="middle" x="{middle}" y="27">{title}</text>
<g transform="translate(26,22)">
<circle r="7" fill="#ff5f57"/><circle cx="22" r="7" fill="#febc2e"/><circle cx="44" r="7" fill="#28c840"/>
</g>
<g transform="translate(9,41)">
{groups}
</g>
</svg>
"""


@dataclass(frozen=True)
class Frame:
    """A screenshot as Textual exports it, and the seconds for which it is shown."""

    svg: str
    seconds: float


def recording(frames: Sequence[Frame], title: str, still: int = -1) -> str:
    """Return an SVG that shows ``frames`` one after the other, in an endless loop.

    If a row of the screen looks the same in several frames, the SVG contains it only once. CSS keyframes make a row
    visible during the frames that contain it.

    Args:
        frames: screenshots of one size.
        title: the title of the window.
        still: index of the frame to show if animations are turned off or unsupported.
    """
    styles = _Styles()
    trees = [ElementTree.fromstring(frame.svg) for frame in frames]
    times: dict[str, list[int]] = defaultdict(list)  # markup of a row -> numbers of the frames that contain it
    for number, tree in enumerate(trees):
        for row in _rows(tree, styles):
            times[row].append(number)
    together: dict[tuple[int, ...], list[str]] = defaultdict(list)  # frames -> rows that are in exactly these frames
    for row, numbers in times.items():
        together[tuple(numbers)].append(row)
    starts = [0.0, *accumulate(frame.seconds for frame in frames)]
    keyframes, groups = [], []
    for group, (those, rows) in enumerate(together.items()):
        hidden = "" if still % len(frames) in those else ' visibility="hidden"'
        groups.append(f'<g class="f" style="animation-name:f{group}"{hidden}>{"".join(rows)}</g>')
        keyframes.append(f"@keyframes f{group}{{{_keyframes(those, starts)}}}")
    _, _, width, height = map(float, trees[0].attrib["viewBox"].split())
    return _DOCUMENT.format(
        width=f"{width:g}", height=f"{height:g}", middle=f"{width / 2:g}", title=escape(title), fonts=_FONTS,
        seconds=f"{starts[-1]:g}", styles=styles.css(), keyframes="\n".join(keyframes), groups="\n".join(groups),
    )  # fmt: skip


@dataclass
class _Styles:
    """Short CSS class names for the styles of all frames."""

    names: dict[str, str] = field(default_factory=dict)  # CSS rules of a style -> its class name

    def name(self, rules: str) -> str:
        return self.names.setdefault(rules, f"r{len(self.names)}")

    def css(self) -> str:
        return "".join(f".{name}{{{rules}}}" for rules, name in self.names.items())


def _keyframes(numbers: Sequence[int], starts: Sequence[float]) -> str:
    """Return CSS keyframes that make a row visible during the frames ``numbers``.

    Frame i begins at ``starts[i]`` seconds. The last of ``starts`` is the end of the recording.
    """
    changes = {0.0: "hidden"}
    for number in numbers:
        changes[starts[number]] = "visible"
        changes[starts[number + 1]] = "hidden"
    changes.pop(starts[-1], None)
    before, keys = "", []
    for second, visibility in changes.items():
        if visibility != before:
            keys.append(f"{100 * second / starts[-1]:.5g}%{{visibility:{visibility}}}")
        before = visibility
    return "".join(keys)


def _rows(root: ElementTree.Element, styles: _Styles) -> Iterable[str]:
    """Yield the markup of each row of a screenshot: backgrounds, and the texts on them."""
    rules = dict(re.findall(r"\.(\S+-r\d+) \{ (.*?);? \}", root.findtext(f"{_SVG}style", "")))
    terminal = root.findall(f"{_SVG}g")[-1]
    rows: dict[int, list[str]] = defaultdict(list)
    for y, left, right, color in _backgrounds(terminal):
        size = f'x="{left:.5g}" y="{y:.5g}" width="{right - left:.5g}" height="{_ROW + 0.25}"'
        rows[round((y - _RECT_TOP) / _ROW)].append(f'<rect fill="{color}" {size}/>')
    for element in terminal.iter(f"{_SVG}text"):
        x, y, style = float(element.attrib["x"]), float(element.attrib["y"]), rules[element.attrib["class"]]
        text = (element.text or "").replace("\xa0", " ")
        if "text-decoration" not in style:
            x += _CELL * (len(text) - len(text.lstrip()))
            text = text.strip()
        # Set the text's length, because a browser's font may be wider. Replace spaces, because browsers collapse them.
        length = f' textLength="{_CELL * cell_len(text):.5g}"' if len(text) > 1 else ""
        content = escape(text, quote=False).replace(" ", "\xa0")
        rows[round((y - _TEXT_TOP) / _ROW)].append(
            f'<text class="{styles.name(style)}" x="{x:.5g}" y="{y:.5g}"{length}>{content}</text>'
        )
    return map("".join, rows.values())


def _backgrounds(terminal: ElementTree.Element) -> Iterable[tuple[float, float, float, str]]:
    """Yield (top, left end, right end, color) for each background. Adjacent backgrounds of one color are joined."""
    last: tuple[float, float, float, str] | None = None
    for rect in terminal.findall(f"{_SVG}rect"):
        x, y, width = (float(rect.attrib[name]) for name in ("x", "y", "width"))
        left, color = x, rect.attrib["fill"]
        if last is not None:
            if (last[0], last[3]) == (y, color) and abs(last[2] - x) < 0.1:
                left = last[1]
            else:
                yield last
        last = y, left, x + width, color
    if last is not None:
        yield last
