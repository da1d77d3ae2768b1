"""Search in the conversation: a bar of one line, and marks on what was found."""

import re
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Collapsible, Input, Static

from minillm.ui.bars import hidden_keys
from minillm.ui.chat.transcript import Transcript
from minillm.ui.numbers import count

# To be seen without colour, too.
_MARK, _CURRENT = "bold underline $warning", "bold reverse $warning"
_MOST_MARKED = 2000  # texts; more would take longer to mark than a reader would wait
_NOT_SAID = ("summary", "branch", "common")  # classes of texts that are the app's own


@dataclass(frozen=True)
class Match:
    """A place in one of the transcript's texts: characters ``start`` to ``end``."""

    text: Static
    start: int
    end: int


def find(transcript: Transcript, words: str) -> list[Match]:
    """All places of ``words`` in questions and answers, from the top; in any case of letters."""
    pattern, found = re.compile(re.escape(words), re.IGNORECASE), []
    for view in transcript.turn_views if words else ():
        for text in view.query(Static):
            if isinstance(text.content, Content) and not any(map(text.has_class, _NOT_SAID)):
                found += [Match(text, *each.span()) for each in pattern.finditer(text.content.plain)]
    return found


class SearchBar(Horizontal):
    """What is searched for, and how much of it was found. Enter goes to the next place, shift+enter to the previous."""

    BINDINGS = [  # noqa: RUF012
        *hidden_keys({"down": "go(1)", "shift+enter,up": "go(-1)"}, priority=True),
    ]

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self._transcript = transcript
        self._matches: list[Match] = []
        self._at = 0
        self._unmarked: dict[Static, Content] = {}  # the texts that are marked, as they were
        self._input = Input(placeholder="search in the conversation", compact=True)
        self._count = Static(id="found")

    def compose(self) -> ComposeResult:
        yield Static("find ", classes="label")
        yield self._input
        yield self._count

    def on_mount(self) -> None:
        self.display = False

    def open(self, words: str) -> None:
        self.display = True
        if words:
            self._input.value = words
        self._input.select_all()
        self._input.focus()
        self.find()

    def close(self) -> bool:
        """Take all marks away; False where the bar is closed already."""
        was_open, self.display = self.display, False
        self._unmark()
        self._matches = []
        return was_open

    def on_input_changed(self) -> None:
        if self.display:
            self.find()

    def on_input_submitted(self) -> None:
        self.action_go(1)

    def action_go(self, step: int) -> None:
        """Go to another place; the text may have grown since the last time."""
        at = self._at
        self.find()
        if self._matches:
            self._at = (at + step) % len(self._matches)
            self._show()

    def find(self) -> None:
        """Mark what is found, and go to the first place from the top of the screen on; if there is none, the first."""
        self._unmark()
        self._matches = find(self._transcript, self._input.value)
        top = self._transcript.region.y
        self._at = next((i for i, each in enumerate(self._matches) if each.text.region.bottom > top), 0)
        for match in self._matches[:_MOST_MARKED]:
            self._mark(match, _MARK)
        self._show()

    def _mark(self, match: Match, style: str) -> None:
        content = match.text.content
        assert isinstance(content, Content)
        self._unmarked.setdefault(match.text, content)
        match.text.update(content.stylize(style, match.start, match.end), layout=False)

    def _unmark(self) -> None:
        for text, content in self._unmarked.items():
            if isinstance(text.content, Content) and text.content.plain == content.plain:  # else it has grown
                text.update(content, layout=False)
        self._unmarked.clear()

    def _show(self) -> None:
        """Mark the current place, and scroll to it."""
        if not self._matches:
            self._say("nothing found" if self._input.value else "")
            return
        self._say(f"{count(self._at + 1)} of {count(len(self._matches))} · Enter, ↑ ↓ · Esc closes")
        match = self._matches[self._at]
        self._mark(match, _CURRENT)
        for parent in match.text.ancestors:
            if isinstance(parent, Collapsible):
                parent.collapsed = False
        self.call_after_refresh(self._bring_into_sight, match)  # an opened part has its place then

    def _say(self, words: str) -> None:
        self._count.update(Content(words), layout=False)  # its place is fixed: the transcript is not laid out anew

    def _bring_into_sight(self, match: Match) -> None:
        transcript, text = self._transcript, match.text
        if not isinstance(text.content, Content) or not text.is_attached:
            return
        before = text.content.plain[: match.start].split("\n")
        width = max(1, text.content_size.width)
        line = sum(1 + len(each) // width for each in before) - 1  # about: words are not broken
        y = int(text.region.y - transcript.region.y + transcript.scroll_y + line)
        if not transcript.scroll_y <= y < transcript.scroll_y + transcript.size.height - 1:
            transcript.release_anchor()
            transcript.scroll_to(y=y - transcript.size.height // 3, animate=False, force=True)
