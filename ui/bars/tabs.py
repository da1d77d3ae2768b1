"""The views of the memory by name, with the key that opens each."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget


@dataclass(frozen=True)
class View:
    """A view of the memory, and the key that opens it. ``short`` is its name where there is little room."""

    name: str
    key: str
    short: str
    summary: str


VIEWS = (
    View("pool", "f5", "pool", "every block of the cache"),
    View("tables", "f6", "tables", "the block tables"),
    View("tree", "f7", "tree", "who shares which blocks with whom"),
    View("events", "f8", "log", "allocate, fork, copy on write, free, hit, evict, swap"),
    View("memory", "f9", "mem", "what is used, shared, cached and wasted"),
    View("steps", "f10", "steps", "what each step did, and where its time went"),
)
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
        for view, (key, title) in zip(VIEWS, labels, strict=True):
            marked = view.name == self.current
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
        for view, (key, title) in zip(VIEWS, labels, strict=True):
            end = start + len(key) + 1 + len(title)
            if start <= event.x < end:
                self.post_message(self.Picked(view.name))
            start = end + gap


def tab_labels(width: int) -> tuple[list[tuple[str, str]], int]:
    """Each view's key and title, and the cells between two of them, for ``width`` cells."""
    full = [(view.key.upper(), view.name) for view in VIEWS]
    short = [(view.key.upper(), view.short) for view in VIEWS]
    bare = [(key if number == 0 else key[1:], title) for number, (key, title) in enumerate(short)]
    for labels, gap in ((full, 3), (full, 2), (full, 1), (short, 1)):
        if sum(len(key) + 1 + len(title) for key, title in labels) + gap * (len(labels) - 1) <= width:
            return labels, gap
    return bare, 1
