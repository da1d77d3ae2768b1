"""A list of completions for the text being typed. It is above the prompt and covers part of the conversation."""

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.geometry import Offset, Region

from minillm.text.safe import clean_line
from minillm.ui.textual_internals import Options

MOST_LINES, _LONGEST_LABEL = 8, 60


@dataclass(frozen=True)
class PopupEntry:
    """A completion in the list. Its ``text`` replaces the characters of the prompt from ``start`` to the cursor."""

    start: tuple[int, int]  # line and column
    text: str
    label: str
    meaning: str = ""
    sends: bool = False  # the text is complete, so Enter also sends it


class Popup(Options, can_focus=False):
    """Shows completions. The prompt keeps the focus, and calls this list's methods for keys."""

    def __init__(self) -> None:
        super().__init__(id="popup", compact=True)
        self._shown: list[PopupEntry] = []

    def on_mount(self) -> None:
        self.display = False

    def show(self, completions: Sequence[PopupEntry], above: Region) -> None:
        """Show ``completions`` above a region of the screen. Hide the list if ``completions`` is empty.

        If the completions have not changed, the selected line stays selected.
        """
        if list(completions) != self._shown:
            self._shown = list(completions)
            width = max((len(each.label) for each in completions), default=0)
            self.clear_options()
            width = min(width, _LONGEST_LABEL)
            labels = [f"{clean_line(each.label, _LONGEST_LABEL):<{width}}  " for each in completions]
            self.add_options(
                Content.assemble((label, "$foreground"), (each.meaning, "$text-muted"))
                for label, each in zip(labels, completions, strict=True)
            )
            self.highlighted = 0 if completions else None
        self.display = bool(completions)
        if self.display:
            height = min(MOST_LINES, len(completions), max(1, above.y - 1))
            self.styles.height = height
            self.styles.width = above.width
            self.absolute_offset = Offset(above.x, above.y - height)

    def close(self) -> bool:
        """Hide the list until the text changes. Return False if it was hidden already."""
        was_open, self.display = self.display, False
        return was_open

    def move(self, step: int) -> None:
        """Select the next line, or the previous one for a ``step`` of -1."""
        if self._shown:
            self.highlighted = ((self.highlighted or 0) + step) % len(self._shown)

    def chosen_of(self, completions: Sequence[PopupEntry]) -> PopupEntry | None:
        """Return the completion that is selected in the list.

        If the list shows other entries than ``completions``, return the first of ``completions``. Return None if
        ``completions`` is empty.
        """
        if self.display and list(completions) == self._shown and self.highlighted is not None:
            return self._shown[self.highlighted]
        return completions[0] if completions else None
