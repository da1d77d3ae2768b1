"""What half-typed text may become: a list above the prompt, in front of the conversation."""

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.geometry import Offset, Region

from minillm.text.safe import clean_line
from minillm.ui.textual_internals import Options

MOST_LINES, _LONGEST_LABEL = 8, 60


@dataclass(frozen=True)
class Completion:
    """One line of the list. ``text`` takes the place of the prompt's characters from ``start`` to its cursor."""

    start: tuple[int, int]  # line and column
    text: str
    label: str
    meaning: str = ""
    sends: bool = False  # it is whole: Enter sends it


class Popup(Options, can_focus=False):
    """Shows completions; the prompt keeps the keyboard, and moves and takes them."""

    def __init__(self) -> None:
        super().__init__(id="popup", compact=True)
        self._shown: list[Completion] = []

    def on_mount(self) -> None:
        self.display = False

    def show(self, completions: Sequence[Completion], above: Region) -> None:
        """Show these above a region of the screen; none hides the list. The chosen line stays while it is there."""
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
        """Hide the list until the text changes; False where it is hidden."""
        was_open, self.display = self.display, False
        return was_open

    def move(self, step: int) -> None:
        """Choose the line above or below."""
        if self._shown:
            self.highlighted = ((self.highlighted or 0) + step) % len(self._shown)

    def chosen_of(self, completions: Sequence[Completion]) -> Completion | None:
        """The chosen one, if these are those that are shown; else the first. None where there is none."""
        if self.display and list(completions) == self._shown and self.highlighted is not None:
            return self._shown[self.highlighted]
        return completions[0] if completions else None
