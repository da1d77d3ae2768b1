"""Search in the conversation: a bar of one line, and marks on the matches."""

from collections.abc import Iterator

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Collapsible, Static

from minillm.ui.bars import hidden_keys
from minillm.ui.chat.find import Finder, FoundPlace, pattern_of
from minillm.ui.chat.transcript import Transcript
from minillm.ui.chat.turn_view import TurnView
from minillm.ui.drawing import line_of
from minillm.ui.keys_in_order import OrderedInput
from minillm.ui.numbers import count

# Both are visible without color.
_MARK, _CURRENT = "bold underline $warning", "bold reverse $warning"
_OWN_TEXT_CLASSES = ("summary", "branch")  # CSS classes of the app's own texts, which are not searched
_OWN_TEXT_WIDGETS = ("CollapsibleTitle", "Bullet")


def message_texts(view: TurnView) -> Iterator[tuple[Static, Content]]:
    """Yield the widgets with texts of the user or the model, from top to bottom, each with its content."""
    for text in view.query(Static):
        apps = type(text).__name__ in _OWN_TEXT_WIDGETS or any(map(text.has_class, _OWN_TEXT_CLASSES))
        if isinstance(text.content, Content) and not apps:
            yield text, text.content


class SearchBar(Horizontal):
    """Shows the search words and the number of matches.

    Enter goes to the next match, shift+enter to the previous one.
    """

    BINDINGS = [  # noqa: RUF012
        *hidden_keys({"down": "go(1)", "shift+enter,up": "go(-1)"}, priority=True),
    ]

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self._transcript = transcript
        self._finder = Finder()
        self._places: list[FoundPlace] = []
        self._at = 0
        self._unmarked: dict[Static, Content] = {}  # marked texts without their marks
        self._input = OrderedInput(placeholder="search in the conversation", compact=True)
        self._count = Static(id="found")

    def compose(self) -> ComposeResult:
        yield Static("find ", classes="label")
        yield self._input
        yield self._count

    def on_mount(self) -> None:
        self.display = False
        self.watch(self._transcript, "shown", self._mark_again, init=False)

    def _mark_again(self) -> None:
        if self.display:
            self.call_after_refresh(self._mark_all)

    def open(self, words: str) -> None:
        self.display = True
        if words:
            self._input.value = words
        self._input.select_all()
        self._input.focus()
        self.find()

    def close(self) -> bool:
        """Close the bar and remove all marks. Return False if it was closed already."""
        was_open, self.display = self.display, False
        self._unmark()
        self._places = []
        return was_open

    def on_input_changed(self) -> None:
        if self.display:
            self.find()

    def on_input_submitted(self) -> None:
        self.action_go(1)

    def action_go(self, step: int) -> None:
        """Go ``step`` matches forward or back. Search again first, because the text may have grown."""
        self._places = self._find()
        if self._places:
            self._at = (self._at + step) % len(self._places)
        self._show()

    def _find(self) -> list[FoundPlace]:
        return self._finder.find(self._transcript.turns, self._input.value)

    def find(self) -> None:
        """Mark the matches. Go to the first match that is visible or below the screen.

        If all matches are above the screen, go to the first match of the conversation.
        """
        self._places = self._find()
        self._at = self._first_in_sight()
        self._show()

    def _first_in_sight(self) -> int:
        """Return the index of the first match that is visible or below the screen.

        If all matches are above the screen, return 0.
        """
        top = self._transcript.region.y
        views = [view for view in self._transcript.turn_views if view.region.bottom > top]
        if not views:
            return 0
        numbers = {turn: number for number, turn in enumerate(self._transcript.turns)}
        first = numbers[views[0].turn]
        above = sum(text.region.bottom <= top for text in self._texts_found(views[0]))
        found = (
            at
            for at, place in enumerate(self._places)
            if numbers[place.turn] > first or (place.turn is views[0].turn and place.number >= above)
        )
        return next(found, 0)

    def _texts_found(self, view: TurnView) -> list[Static]:
        """Return, for each match in a turn, the widget that contains it."""
        pattern = pattern_of(self._input.value)
        return [text for text, content in message_texts(view) for _ in pattern.finditer(content.plain)]

    def _mark_all(self) -> None:
        """Mark the matches in the mounted turns."""
        self._unmark()
        if not self._places:
            return
        pattern, current = pattern_of(self._input.value), self._places[self._at]
        for view in self._transcript.turn_views:
            number = 0
            for text, content in message_texts(view):
                marked = content
                for each in pattern.finditer(content.plain):
                    marked = marked.stylize(_MARK, *each.span())
                    if view.turn is current.turn and number == current.number:
                        marked = marked.stylize(_CURRENT, *each.span())
                    number += 1
                if marked is not content:
                    self._unmarked[text] = content
                    text.update(marked, layout=False)

    def _unmark(self) -> None:
        for text, content in self._unmarked.items():
            if isinstance(text.content, Content) and text.content.plain == content.plain:  # else it has grown
                text.update(content, layout=False)
        self._unmarked.clear()

    def _show(self) -> None:
        """Mark all matches and scroll to the current match."""
        self._mark_all()
        if not self._places:
            self._say("nothing found" if self._input.value else "")
            return
        self._say(f"{count(self._at + 1)} of {count(len(self._places))} · Enter, ↑ ↓ · Esc closes")
        # The worker is not exclusive: a later call must not cancel it while it changes the transcript.
        self.run_worker(self._go(self._places[self._at]))

    async def _go(self, place: FoundPlace) -> None:
        """Mount the turn of a match, unfold the text that contains the match, and scroll to it."""
        view = await self._transcript.bring(place.turn)
        texts = [] if view is None else self._texts_found(view)
        if view is None or not self.display or place not in self._places[self._at : self._at + 1]:
            return
        if place.number >= len(texts):  # the match is in a file's text, which is not shown
            self._transcript.select(place.turn)
            self.call_after_refresh(self._transcript.scroll_to_widget, view, animate=False, top=True)
            return
        text = texts[place.number]
        for parent in text.ancestors:
            if isinstance(parent, Collapsible):
                parent.collapsed = False
        number = texts[: place.number].count(text)
        self.call_after_refresh(self._bring_into_sight, text, number)  # by then, a part just unfolded is laid out

    def _say(self, words: str) -> None:
        self._count.update(Content(words), layout=False)  # the size is fixed, so no layout is needed

    def _bring_into_sight(self, text: Static, number: int) -> None:
        """Scroll to match ``number`` within the widget ``text``."""
        transcript = self._transcript
        if not isinstance(text.content, Content) or not text.is_attached or not self.display:
            return
        matches = list(pattern_of(self._input.value).finditer(text.content.plain))
        line = line_of(text, text.content.plain[: matches[number].end() if number < len(matches) else 0])
        y = int(text.region.y - transcript.region.y + transcript.scroll_y + line)
        if not transcript.scroll_y <= y < transcript.scroll_y + transcript.size.height - 1:
            transcript.release_anchor()
            transcript.scroll_to(y=y - transcript.size.height // 3, animate=False, force=True)
