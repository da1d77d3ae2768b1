"""The text area for questions. Enter sends the text.

A long paste is stored separately, because laying out its text would take seconds. The prompt shows only a mark for it:
``[pasted text 1: 5,000 characters, 90 lines]``.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from textual import events, on
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widgets.text_area import Edit, EditResult, Location

from minillm.text.safe import clean
from minillm.ui.bars import hidden_keys
from minillm.ui.chat.files import (
    best_matches,
    dropped_files,
    files_below,
    folded_files,
    is_path,
    matching_paths,
    mention,
    unfinished_mention,
)
from minillm.ui.chat.popup import Popup, PopupEntry
from minillm.ui.chat.slash import CommandTable
from minillm.ui.engine_app import CommandRequested
from minillm.ui.numbers import count, plural
from minillm.ui.textual_internals import SteadyTextArea

_LONGEST_PASTE = 4000  # a paste of more characters is replaced by a mark
_MOST_PASTED_LINES = 100
_MOST_OFFERED = 50  # maximum number of files to offer
_WAIT = 0.35  # a digit accepts a candidate after this many seconds; text typed before then cancels the choice
_AT_ONCE = 1.0  # text typed within this many seconds after a digit undoes the choice, and both become text
_NEWLINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")


class PromptInput(SteadyTextArea):
    """A text area that grows with its text.

    On Enter it posts `Submitted`. ↑ in the first line brings back earlier texts.

    In an empty prompt, ``?`` opens the help, and a digit accepts a candidate if there are any. Ctrl+j and alt+enter
    insert a line break. So does shift+enter, but only with the Kitty keyboard protocol: most terminals send the same
    byte for Enter and shift+enter.
    """

    BINDINGS = [*hidden_keys({"ctrl+underscore,alt+z": "undo"})]  # noqa: RUF012

    @dataclass
    class Submitted(Message):
        """The user pressed Enter."""

        text: str

    @dataclass
    class CandidateRequested(Message):
        """The user pressed Space in an empty prompt: show the first candidate in full screen."""

    def __init__(self, commands: CommandTable, popup: Popup) -> None:
        super().__init__(compact=True, highlight_cursor_line=False, placeholder="Ask something")
        self._commands, self.popup = commands, popup
        self._files: list[str] | None = None  # files to offer after an @; reset when the prompt is empty
        self._held: dict[str, str] = {}  # mark in the text -> the pasted text or file that it stands for
        self._history: list[str] = []  # sent texts, the latest last
        self._recalled: int | None = None  # if the prompt shows a text of the history, its index there
        self._draft = ""  # the unsent text that was in the prompt before a text of the history was shown
        self.num_picks = 0  # number of candidates that a digit can accept now
        self._picked, self._picked_at = "", 0.0  # the last digit that selected a candidate, and when it was typed
        self._pick: Timer | None = None  # a timer that runs until the digit takes effect

    @property
    def full_text(self) -> str:
        """Return the text with the original text in place of each mark such as ``[a.txt: 2 KiB, 40 lines]``."""
        text = self.text
        for mark, held in reversed(self._held.items()):  # a paste may contain marks of files
            text = text.replace(mark, held)
        return text

    @property
    def draft(self) -> str:
        """Return the unsent text: `full_text`, or "" if the prompt is blank or shows a text that was sent before."""
        text = self.full_text
        return "" if not text.strip() or text in map(clean, self._history) else text

    def take(self) -> str:
        """Return the full text, add it to the history, and empty the prompt."""
        text = self.full_text
        self.remember(text)
        self.text = ""
        self._held.clear()
        return text

    def begin(self, text: str) -> None:
        """Replace the text and focus the prompt."""
        self.text = text
        self.move_cursor(self.document.end)
        self.focus()

    def completions(self) -> list[PopupEntry]:
        """Return completions of the text before the cursor: commands, or files below the current folder."""
        if found := self._commands.completions(self.text):
            return [
                PopupEntry((0, 0), f"/{each.name}" + " " * bool(each.argument), each.usage, each.summary,
                           not each.needs_argument)
                for each in found
            ]  # fmt: skip
        row, column = self.cursor_location
        begun = unfinished_mention(self.document.get_line(row)[:column])
        if begun is None:
            return []
        start, letters = begun
        if is_path(letters):
            names = matching_paths(letters, Path.cwd())[:_MOST_OFFERED]
        else:
            if self._files is None:
                self._files = files_below(Path.cwd())
            names = best_matches(self._files, letters, _MOST_OFFERED)
        texts = [mention(name) + " " if name[-1] != "/" else mention(name).removesuffix('"') for name in names]
        return [PopupEntry((row, start), text, name) for text, name in zip(texts, names, strict=True)]

    @on(SteadyTextArea.Changed)
    def _offer(self) -> None:
        """Show the completions of the text, unless the text was brought back from the history."""
        if not self.text:
            self._files = None
        self.popup.show([] if self._recalled is not None else self.completions(), self.region)

    def close_popup(self) -> bool:
        """Hide the completions until more is typed. Return False if none were shown."""
        return self.popup.close()

    def _complete(self, key: str) -> bool:
        """Use the selected completion. Return False without a selection, or if Enter should send the text."""
        chosen = self.popup.chosen_of(self.completions())
        if chosen is None or self._recalled is not None:
            return False
        start, end = chosen.start, self.cursor_location if chosen.start != (0, 0) else self.document.end
        is_whole = self.document.get_text_range(start, end).strip() == chosen.text.strip()
        if key == "enter" and is_whole:
            return False
        self.replace(chosen.text, start, end, maintain_selection_offset=False)
        self.move_cursor((start[0], start[1] + len(chosen.text)))
        self.popup.close()
        return not (key == "enter" and chosen.sends)

    def remember(self, text: str) -> None:
        """Add a text to the prompt's history. The user presses ↑ to bring back texts from the history."""
        if not self._history or self._history[-1] != text:
            self._history.append(text)
        self._recalled = None

    def _recall(self, step: int) -> bool:
        """Show the previous (``step`` -1) or next (1) text of the history. Return False if there is no such text."""
        at = len(self._history) if self._recalled is None else self._recalled
        if not 0 <= at + step <= len(self._history) or not self._history:
            return False
        if self._recalled is None:
            self._draft = self.full_text
        self._recalled = at + step if at + step < len(self._history) else None
        self._held.clear()
        self.text = self._stand_in(self._draft if self._recalled is None else self._history[self._recalled])
        self.move_cursor(self.document.end)
        return True

    def forget_pick(self) -> None:
        """Make the last choice of a candidate by digit final. Text typed from now on does not undo the choice."""
        self._picked = ""

    def put_back(self, text: str) -> None:
        """Insert a text that could not be sent, before any text typed since."""
        self.move_cursor((0, 0))
        separator = "\n" if self.text else ""
        self.insert(self._stand_in(text) + separator)
        self.move_cursor(self.document.end)

    def _stand_in(self, text: str) -> str:
        """Return ``text`` with a mark such as ``[a.txt: 2 KiB, 40 lines]`` in place of each file's text.

        If the result is still too long, return a single mark that stands for all of it.
        """
        text, files = folded_files(text)
        self._held.update(files)
        if len(text) <= _LONGEST_PASTE and text.count("\n") < _MOST_PASTED_LINES:
            return text
        lines = plural(text.count("\n") + 1, "line")
        mark = f"[pasted text {len(self._held) + 1}: {count(len(text))} characters, {lines}]"
        self._held[mark] = text
        return mark

    def edit(self, edit: Edit) -> EditResult:
        """Edit the text, but never split a mark such as ``[a.txt: 2 KiB, 40 lines]``.

        Deleting a part of a mark deletes the whole mark. Inserting inside a mark inserts after the mark.
        """
        start, end = edit.top, edit.bottom
        for first, last in self._marks({start[0], end[0]}):
            if start == end and first < start < last:
                start = end = last
            elif first < end and start < last:
                start, end = min(start, first), max(end, last)
        edit.from_location, edit.to_location = start, end
        return super().edit(edit)

    def _marks(self, rows: set[int]) -> Iterator[tuple[Location, Location]]:
        """Yield the start and end of each mark in these lines. A mark is like ``[a.txt: 2 KiB, 40 lines]``."""
        for row in rows:
            for mark in self._held:
                for found in re.finditer(re.escape(mark), self.document.get_line(row)):
                    yield (row, found.start()), (row, found.end())

    def render_line(self, y: int) -> Strip:
        # Textual divides by the width when it wraps the placeholder.
        return super().render_line(y) if self.content_size.width > 0 else Strip([])

    async def on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.replace(
            self._stand_in(dropped_files(event.text) or event.text), *self.selection, maintain_selection_offset=False
        )

    async def on_key(self, event: events.Key) -> None:
        if self._handle_special_key(event):
            event.stop()
            event.prevent_default()

    def _is_text_after_digit(self, character: str) -> bool:
        """Return whether ``character`` shows that the last digit was meant as text, not as a choice."""
        at_once = time.monotonic() - self._picked_at < _AT_ONCE
        return at_once and (character in tuple(" .,:;)-+*%") or character.isdecimal())

    def _accept(self, number: str) -> None:
        """Accept the candidate that the user selected by typing a digit, unless the selection was canceled."""
        if self._cancel_pick():
            self.post_message(CommandRequested("accept", number))

    def _cancel_pick(self) -> bool:
        """Cancel the choice of a candidate by digit that waits to take effect. Return False if no choice waits."""
        pick, self._pick = self._pick, None
        if pick is not None:
            pick.stop()
        return pick is not None

    def _handle_special_key(self, event: events.Key) -> bool:
        """Handle a key with a special meaning in this text area. Return False for any other key."""
        picked, self._picked = self._picked, ""
        if picked and not self.text and self._is_text_after_digit(event.character or ""):
            self.insert(picked + (event.character or ""))  # "2 more colors please": it was text
            if not self._cancel_pick():
                self.post_message(CommandRequested("undo"))
            return True
        if picked:
            self._accept(picked)
        if self.popup.display and event.key in ("up", "down"):
            self.popup.move(-1 if event.key == "up" else 1)
        elif event.key in ("tab", "enter") and self._complete(event.key):
            pass
        elif event.key == "enter":
            self.popup.close()
            if self.full_text.strip():
                self.post_message(
                    self.Submitted(self.take().rstrip().lstrip("\n"))
                )  # now, because the next key may have arrived already
        elif not self.text and event.key.isdecimal() and 1 <= int(event.key) <= self.num_picks:
            self._picked, self._picked_at = event.key, time.monotonic()
            self._pick = self.set_timer(_WAIT, partial(self._accept, event.key))
        elif event.key == "space" and not self.text and self.num_picks:
            self.post_message(self.CandidateRequested())
        elif event.key == "up" and self.cursor_at_first_line:
            return self._recall(-1)
        elif event.key == "down" and self.cursor_at_last_line and self._recalled is not None:
            return self._recall(1)
        elif event.key in _NEWLINE_KEYS:
            self.replace("\n", *self.selection, maintain_selection_offset=False)
        elif event.character == "?" and not self.text:
            self.post_message(CommandRequested("help"))
        else:
            return False
        return True
