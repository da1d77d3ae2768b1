"""The views of the memory by name, with the key that opens each."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

_TITLES = (
    ("pool", "F5", "pool", "pool"),
    ("tables", "F6", "tables", "tables"),
    ("tree", "F7", "tree", "tree"),
    ("events", "F8", "events", "log"),
    ("memory", "F9", "memory", "mem"),
    ("steps", "F10", "steps", "steps"),
)  # view, key, title, short title
_MARK = "▸"  # before the current one: to be seen without colour, too


class ViewTabs(Widget):
    """One line. The names get shorter, and the keys lose their F, where there is little room."""

    current: reactive[str] = reactive("pool")

    @dataclass
    class Picked(Message):
        """The mouse chose a view."""

        view: str

    def render(self) -> Content:
        labels, gap = tab_labels(self.content_size.width)
        parts: list[Content] = []
        for (view, *_), (key, title) in zip(_TITLES, labels, strict=True):
            marked = view == self.current
            parts.append(
                Content.assemble(
                    (key, "$footer-key-foreground" if marked else "$foreground 60%"),
                    (_MARK if marked else " ", "$primary"),
                    (title, "bold $foreground" if marked else "$foreground 60%"),
                )
            )
        return Content(" " * gap).join(parts)

    def on_click(self, event: events.Click) -> None:
        labels, gap = tab_labels(self.content_size.width)
        start = self.styles.padding.left
        for (view, *_), (key, title) in zip(_TITLES, labels, strict=True):
            end = start + len(key) + 1 + len(title)
            if start <= event.x < end:
                self.post_message(self.Picked(view))
            start = end + gap


def tab_labels(width: int) -> tuple[list[tuple[str, str]], int]:
    """Each view's key and title, and the cells between two of them, for ``width`` cells."""
    full = [(key, title) for _, key, title, _ in _TITLES]
    short = [(key, title) for _, key, _, title in _TITLES]
    bare = [(key if number == 0 else key[1:], title) for number, (key, title) in enumerate(short)]
    for labels, gap in ((full, 3), (full, 2), (full, 1), (short, 1)):
        if sum(len(key) + 1 + len(title) for key, title in labels) + gap * (len(labels) - 1) <= width:
            return labels, gap
    return bare, 1
