"""All uses of Textual's private names. The other modules use only documented names.

Written for and tested with Textual 8.2.8. After an update, check this file first.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
from codecs import getincrementaldecoder
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from rich import cells
from textual import constants, events
from textual._xterm_parser import XTermParser
from textual.app import App, ComposeResult
from textual.command import CommandList, CommandPalette
from textual.css.query import NoMatches
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Offset, Size
from textual.keys import Keys
from textual.scroll_view import ScrollView
from textual.widget import MountError, Widget
from textual.widgets import OptionList, TextArea
from textual.worker import WorkerFailed

import minillm.ui.textual_styles  # noqa: F401  it makes styling faster
from minillm.text.safe import clean
from minillm.ui.keys_in_order import KeysInOrder
from minillm.ui.terminal import LateAnswers, Pastes

if TYPE_CHECKING:
    from textual._arrange import DockArrangeResult
    from textual.content import Content
    from textual.widgets._markdown import MarkdownListItem as MarkdownListItem
    from textual.widgets._markdown import MarkdownParagraph as MarkdownParagraph
    from textual.widgets._markdown import MarkdownTable as MarkdownTable
    from textual.widgets.markdown import MarkdownBlock
    from textual.widgets.text_area import Edit, EditResult

if "ESCDELAY" not in os.environ:
    constants.ESCAPE_DELAY = 0.05  # type: ignore[misc]  # seconds after which Escape is a key of its own
_QUIET = 0.1  # seconds to wait for a key at a time
_SOON = 0.02  # seconds to wait for more input if a sequence is incomplete, or if a paste may continue
_LONGEST_BURST = 1 << 20  # maximum bytes of a paste without marks that is treated as one text
_COMPLETE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-Z\\-~]")  # a control sequence; "\x1b[[" begins a key of the Linux console
_KITTY_KEY = re.compile(r"\x1b\[(\d*)[\d:]*(?:;(\d*)(?::(\d*))?)?((?:;[\d:]*)?[u~ABCDEFHPQRS])")
_RELEASED = "3"  # type of a key event in the Kitty protocol
_KEEP_TITLE, _TITLE_BEFORE = "\x1b[22;2t", "\x1b[23;2t"  # push and pop xterm's title; other terminals ignore them
_EMOJI_LOOK = "\ufe0f"  # variation selector 16: only some terminals draw the character before it wide
_load_cell_table = cells.load_cell_table


@cache
def _without_wide_looks(unicode_version: str = "auto") -> cells.CellTable:
    return _load_cell_table(unicode_version)._replace(narrow_to_wide=frozenset())


cells.load_cell_table = _without_wide_looks  # variation selectors change no width, see `TerminalDriver.write`


def __getattr__(name: str) -> Any:
    """Import Textual's Markdown classes on first use. Importing takes a tenth of the time until the first screen."""
    if name not in ("MarkdownListItem", "MarkdownParagraph", "MarkdownTable"):
        raise AttributeError(name)
    from textual.widgets import _markdown

    return getattr(_markdown, name)


class CrashStoringApp(App[None]):
    """An app that stores the exception that ended it, so that the app's caller can report the error in one line."""

    _has_titled = False
    typed_before: bytes = b""  # keys read from the terminal before the app started

    @property
    def failure(self) -> BaseException | None:
        """Return the exception that ended the app, or None."""
        error = self._exception
        return error.__cause__ or error.error if isinstance(error, WorkerFailed) else error

    @property
    def can_suspend(self) -> bool:
        """Return whether the app can hand the terminal to another program and take it back."""
        return self._driver is not None and self._driver.can_suspend

    def set_window_title(self, title: str) -> None:
        """Save the terminal window's title, and set another one. ``title`` must have no control characters."""
        if self._driver is not None:
            keep = "" if self._has_titled else _KEEP_TITLE
            self._has_titled = True
            self._driver.write(f"{keep}\x1b]2;{title}\x07")
            self._driver.flush()

    def restore_window_title(self) -> None:
        """Restore the window's original title."""
        if self._has_titled and self._driver is not None:
            self._has_titled = False
            self._driver.write(_TITLE_BEFORE)
            self._driver.flush()

    def _handle_exception(self, error: Exception) -> None:
        # After `exit`, Textual removes widgets and mounts no new ones, while other widgets still handle messages. The
        # errors that this causes are ignored.
        if not (self._exit and isinstance(error, MountError | NoMatches)):
            super()._handle_exception(error)

    def _fatal_error(self) -> None:
        # Textual would print a traceback with all local variables.
        self._close_messages_no_wait()

    def _print_error_renderables(self) -> None:
        self._exit_renderables.clear()


class Growing:
    """Mixin for a widget that grows: its new size does not trigger a second layout.

    Textual requests a second layout whenever a widget's virtual size changes, because scrollbars might appear or
    disappear. This is not needed, because scrollbars request a layout themselves. Textual also requests a second layout
    after a widget's first one.

    The mixin is not a widget itself. Otherwise Textual would take no styles from the widget's other base class.
    """

    outer_size: Size
    _layout_required: bool

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        update, known = super()._size_updated, bool(self.outer_size)  # type: ignore[misc]
        resized = bool(update(size, virtual_size, container_size, layout=False))
        if size and not known:
            self._layout_required = False  # the layout that was requested when the widget was created is done now
        return resized


class IgnoresRemovedWidgets:
    """Mixin for a screen: a click on a removed widget selects no text.

    A removed widget stays visible until the next layout. If the user clicked it, Textual would look for the region of
    the widget's parent, and fail, because a removed widget has no parent.
    """

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """Return the widget at a cell and the position in its text: (None, None) for a removed widget."""
        widget: Widget | None
        widget, offset = super().get_widget_and_offset_at(x, y)  # type: ignore[misc]
        is_removed = widget is not None and widget is not self and widget.parent is None
        return (None, None) if is_removed else (widget, offset)


class FillsTerminal:
    """Mixin for a screen: it always has the terminal's current size, even if an older resize event says otherwise.

    A screen sends itself a resize event with its size when it is laid out. During a `batch_update`, two events with
    different sizes may be queued. Each would cause the other again, forever, and nothing else in the app would run.
    """

    app: App[Any]

    async def _on_resize(self, event: events.Resize) -> None:
        event.size = self.app.size


class HoldsPosition:
    """Mixin for a scrolling container: it can hold one child in place while other children are added or removed.

    The container scrolls during the layout that moves the children, so nothing jumps on the screen. Like `Growing`, the
    mixin is not a widget itself.
    """

    _kept: tuple[Widget, int] | None = None
    _is_laid_out = False  # whether a layout has happened since `hold_position`

    def hold_position(self, child: Widget, line: int) -> None:
        """Hold line ``line`` of ``child`` at the top of the screen, from the next layout until `release_position`."""
        self._kept, self._is_laid_out = (child, line), False

    @property
    def place(self) -> tuple[Widget, int] | None:
        """Return the child and the line that are held in place, or None."""
        return self._kept

    @property
    def waits_for_layout(self) -> bool:
        """Return whether a place is held, but no layout has happened since `hold_position`.

        Callers need this, because Textual's ``call_after_refresh`` may call a function before the layout.
        """
        return self._kept is not None and not self._is_laid_out

    def release_position(self) -> None:
        self._kept = None

    @property
    def is_anchored_to_end(self) -> bool:
        """Return whether each layout scrolls to the end, because the user has scrolled to the end."""
        assert isinstance(self, Widget)
        return self._anchored and not self._anchor_released

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Arrange the children, and scroll so that the line held by `hold_position` does not move on the screen."""
        assert isinstance(self, Widget)
        result: DockArrangeResult = super().arrange(size, optimal)  # type: ignore[misc]
        self._is_laid_out = True
        if self._kept is not None and not self.is_anchored_to_end:
            child, line = self._kept
            for placement in result.placements:
                if placement.widget is child:
                    top = min(placement.region.y + line, result.total_region.bottom - size.height)
                    _scroll_in_layout(self, float(max(0, top)))
        return result


def _scroll_in_layout(widget: Widget, top: float) -> None:
    # Set the position in the same way as Textual's compositor does for an anchored widget: without calling watchers.
    widget.set_reactive(Widget.scroll_y, top)
    widget.set_reactive(Widget.scroll_target_y, top)
    scrollbar: Any = widget.vertical_scrollbar
    scrollbar._reactive_position = top


class SteadyScrollView(ScrollView):
    """A scroll view that redraws its scrollbar only if the scrollbar changed, instead of at each layout."""

    def has_scrollbar_for(self, num_lines: int) -> bool:
        """Return whether the scrollbar is right for ``num_lines`` lines: hidden if all lines fit, otherwise shown."""
        return self.show_vertical_scrollbar == (num_lines > self.size.height)

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        if size == self.outer_size and self.has_scrollbar_for(self.virtual_size.height):
            return False
        return super()._size_updated(size, virtual_size, container_size, layout)


class UpdatesItself:
    """Mixin for a Markdown block that grows in its own way: Textual calls `become` when its text grows."""

    async def become(self, block: MarkdownBlock) -> None:
        """Show the text of ``block``, a later version of this block with more text. A subclass implements this."""
        raise NotImplementedError

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        await self.become(block)


class NotifiedOfText:
    """Mixin for a Markdown table that is told when Textual has made it grow: `text_changed` is called."""

    text_changed: Any  # a method that is called with the later version of this table; a subclass implements it

    async def _update_from_block(self: Any, block: Any) -> None:
        if isinstance(block, type(self)) and len(block._get_headers_and_rows()[1]) < len(self._rows):
            # The last row begins another block. Textual cannot remove rows, but replaces a table without rows.
            self.query_one("MarkdownTableContent").rows = []
        await super()._update_from_block(block)  # type: ignore[misc]
        self.text_changed(block)


async def update_block(block: MarkdownBlock, later: MarkdownBlock) -> None:
    """Make a block show the text of ``later``, a version of the block with more text."""
    await block._update_from_block(later)


def parts_of(block: MarkdownBlock) -> list[MarkdownBlock]:
    """Return the inner blocks of ``block``, which Textual has not composed yet."""
    return block._blocks


def store_content(block: MarkdownBlock, content: Content) -> None:
    block._content = content


class Options(OptionList):
    """A list that ignores clicks on removed options, which stay visible until the next layout."""

    def _on_click(self, event: events.Click) -> None:  # type: ignore[override]
        if event.style.meta.get("option", 0) >= self.option_count:
            event.prevent_default()


class SteadyTextArea(KeysInOrder, TextArea):
    """A text area that never contains terminal control characters, however the text gets into it.

    It also avoids an error in Textual: after an undo that removes lines, Textual may look up the cursor in a removed
    line. This happens if the scrollbar disappears together with the lines.
    """

    def _set_document(self, text: str, language: str | None) -> None:
        super()._set_document(clean(text), language)

    def edit(self, edit: Edit) -> EditResult:
        """Clean the new text of terminal control characters, then edit."""
        edit.text = clean(edit.text)
        return super().edit(edit)

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """Scroll to the cursor. Do nothing if the cursor is still in a line that was removed."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)


class _Commands(CommandList, Options, can_focus=False):
    """The list in the command palette."""


class EarlyInputPalette(FillsTerminal, CommandPalette):
    """A command palette that can be paged and clicked before its list has been laid out."""

    def compose(self) -> ComposeResult:
        for part in super().compose():
            yield _Commands() if isinstance(part, CommandList) else part

    def _action_command_list(self, action: str) -> None:
        with suppress(KeyError):
            super()._action_command_list(action)


class KeyParser(XTermParser):
    """Textual's parser of keys, but an unreadable escape sequence is ignored.

    Textual itself would raise an error, or return a key for each character of the sequence.
    """

    @property
    def waits(self) -> bool:
        """Return whether only the beginning of an escape sequence has arrived. If so, call `tick` soon."""
        return self._timeout_time is not None

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if sequence == "\x1b\r":  # Textual would ignore Alt
            return [events.Key("alt+enter", None)]
        if (kitty := _KITTY_KEY.fullmatch(sequence)) is not None:
            code, modifiers, kind, rest = kitty.groups()
            if kind == _RELEASED:
                return [events.Key(Keys.Ignore, sequence)]
            if kind is not None or ":" in sequence.partition(";")[0]:
                sequence = f"\x1b[{code};{modifiers or 1}{rest}"
        try:
            keys = list(super()._sequence_to_key_events(sequence, alt))
        except (ValueError, OverflowError):  # there is no such character
            keys = []
        # The parser itself handles mouse and mode reports, which are not keys.
        is_report = sequence[-1:] in ("M", "m", "y")
        return keys or ([events.Key(Keys.Ignore, sequence)] if _COMPLETE.fullmatch(sequence) and not is_report else [])


class TerminalDriver(LinuxDriver):
    """Textual's terminal driver, with safer input.

    - Invalid UTF-8 does not end the app. The end of input does.
    - Keys that were typed before the app started are handled first.
    - The terminal's answers to earlier questions, and pasted text, are not taken for keys.
    - A process that was stopped by another signal than SIGTSTP, such as SIGSTOP, continues with one input thread.
    """

    def _sigcont_application(self, *args: object) -> None:
        """Handle SIGCONT: start application mode again.

        If SIGTSTP has not ended application mode, end it first. Otherwise two threads would read the terminal, and the
        older thread would still wait for a key when the app ends.
        """
        if self._auto_restart and not self._must_signal_resume:  # only the handler of SIGTSTP sets the latter
            self.suspend_application_mode()
        super()._sigcont_application(*args)

    def write(self, data: str) -> None:
        """Write to the terminal, without variation selectors, which may change the width of characters.

        Text that the user copies keeps the variation selectors.
        """
        super().write(data.replace(_EMOJI_LOOK, ""))

    def run_input_thread(self) -> None:
        decode = getincrementaldecoder("utf-8")("replace").decode
        parser, answers, pastes = KeyParser(self._debug), LateAnswers(), Pastes()

        def process(data: bytes) -> None:
            for is_pasted, part in pastes.split(answers.without(data)):
                if is_pasted:
                    self.process_message(events.Paste(part.decode("utf-8", "replace")))
                elif text := decode(part):  # the parser would take an empty text for the end
                    for event in parser.feed(text):
                        self.process_message(event)

        assert isinstance(self._app, CrashStoringApp)
        typed, self._app.typed_before = self._app.typed_before, b""  # only once: this runs again after a suspension
        process(typed)
        with selectors.DefaultSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                data = b""
                if selector.select(_SOON if answers.holds or parser.waits else _QUIET):
                    data = self._read()
                    if not data:
                        os.kill(os.getpid(), signal.SIGHUP)
                        return
                    # Several lines may be a paste without marks. Read all of it, to treat it as one text.
                    while len(data) > 1 and b"\r" in data and len(data) < _LONGEST_BURST and selector.select(_SOON):
                        more = self._read()
                        if not more:
                            break
                        data += more
                process(data)
                for event in parser.tick():
                    self.process_message(event)

    def _read(self) -> bytes:
        """Read the available input. Return b"" if the terminal was closed."""
        try:
            return os.read(self.fileno, 4096)
        except OSError:
            return b""
