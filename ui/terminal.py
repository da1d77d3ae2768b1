"""Set up the terminal for the app, and restore it however the app ends.

Textual restores the terminal when it exits normally, but not on SIGTERM and SIGHUP. Then the alternate screen, mouse
and focus reports, bracketed paste, the hidden cursor and raw mode would all stay. So minillm makes the app exit
normally on these signals. If the app hangs or the terminal is gone, it may not exit. After `_PATIENCE` seconds, a
thread then restores the terminal and ends the process.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from minillm.errors import UsageError

_PATIENCE = 2.0  # seconds from a signal to the forced exit
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Disable bracketed paste, mouse, focus reports, in-band resize and the Kitty keyboard; enable wrapping; then switch to
# the main screen and show the cursor.
_RESET = (
    "\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2048l\x1b[<u"
    "\x1b[?7h\x1b[?1049l\x1b[?25h\x1b[0m"
)
_LONGEST_WAIT = 0.1  # maximum seconds to wait for the terminal's answer after everything else is done
# Ask for the background color (OSC 11), then for the terminal's type (DA). All terminals answer the second question,
# and answer in order. So if only that answer arrives, there will be no answer to the first.
_QUESTION = b"\x1b]11;?\x1b\\\x1b[c"
_COLOR = rb"\x1b\]11;([^\x07\x1b]*)(?:\x07|\x1b\\)"
_KIND = rb"\x1b\[\?[0-9;]*c"
# Any OSC, DCS or kitty graphics string in the input is an answer, because no key sends such a string.
_STRING = rb"(?:\][0-9]|P[0-9>!]|_G)[^\x07\x1b]*"
_ANSWERS = re.compile(rb"\x1b" + _STRING + rb"(?:\x07|\x1b\\)|" + _KIND)
# The beginning of an answer, or of the mark of a bracketed paste.
_BEGUN = re.compile(rb"\x1b(?:" + _STRING + rb"\x1b?|[\]P_]|\[(?:\?[0-9;]*|2(?:00?)?)?)?$")
_LONGEST_ANSWER = 1.0  # maximum seconds between parts of an answer, for a slow connection
_PASTE_BEGINS, _PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
_NO_TEXT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~])")
_RGB = re.compile(rb"rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})(?:/[0-9a-fA-F]{1,4})?")


def is_plain_only() -> bool:
    """Return whether the app cannot draw here: a stream is not a terminal, or the terminal cannot move its cursor."""
    streams = (sys.__stdin__, sys.__stdout__)
    is_terminal = all(stream is not None and stream.isatty() for stream in streams)
    return not is_terminal or _draws_lines_only()


def check_terminal(command: str = "minillm chat") -> None:
    """Raise UsageError if ``command`` cannot draw on the terminal or read keys from it."""
    for stream, name in ((sys.__stdin__, "input"), (sys.__stdout__, "output"), (sys.__stderr__, "error")):
        if stream is None or not stream.isatty():
            problem = f"{command} needs a terminal, but standard {name} is not one"
            raise UsageError(f"{problem}; run it in a terminal, or use `minillm chat --plain`")
    if _draws_lines_only():
        kind = os.environ.get("TERM", "")
        problem = f"{command} needs a terminal that can move its cursor, but TERM is {kind!r}"
        raise UsageError(f"{problem}; set TERM, for example to xterm-256color, or use `minillm chat --plain`")


def _draws_lines_only() -> bool:
    """Return whether the terminal cannot move its cursor, or does not state its type."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")


@contextlib.contextmanager
def ending_on_signals(leave: Callable[[int], None]) -> Iterator[None]:
    """Make `_SIGNALS` call ``leave(exit code)`` in the running event loop, until the ``with`` block ends.

    Enter the block inside the event loop, from the main thread. If the process has not ended `_PATIENCE` seconds after
    a signal, it is ended by force.
    """
    loop = asyncio.get_running_loop()
    assert sys.__stdin__ is not None
    assert sys.__stderr__ is not None
    keyboard, screen = sys.__stdin__.fileno(), sys.__stderr__.fileno()
    attributes: list | None = None
    with contextlib.suppress(OSError, termios.error):
        attributes = termios.tcgetattr(keyboard)

    def force(code: int) -> None:
        with contextlib.suppress(OSError, termios.error):
            os.set_blocking(screen, False)
            os.write(screen, _RESET.encode())
            os.set_blocking(screen, True)
            if attributes is not None:
                termios.tcsetattr(keyboard, termios.TCSANOW, attributes)
        os._exit(code)

    def handle(number: int, frame: FrameType | None) -> None:
        code = 128 + number
        timer = threading.Timer(_PATIENCE, force, [code])
        timer.daemon = True
        timer.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the app is exiting
            loop.call_soon_threadsafe(leave, code)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class TerminalAnswer:
    """The terminal's background, and the keys that were typed while `asking_background` waited for the answer.

    Both are set when `asking_background` has ended.

    Attributes:
        background: ``light``, ``dark`` or empty if unknown.
        typed: the bytes of the keys.
    """

    background: str = ""
    typed: bytes = b""


@contextlib.contextmanager
def asking_background() -> Iterator[TerminalAnswer]:
    """Ask the terminal for its background, run the ``with`` block, then wait for the answer.

    The wait takes at most `_LONGEST_WAIT` seconds. The terminal is not asked in these cases: keys are waiting; input or
    output is not a terminal, or belongs to another job; the terminal would print the question.

    Keys typed while the block runs are not echoed. Afterwards, the terminal's state is restored. `LateAnswers` drops an
    answer that arrives later.
    """
    answer = TerminalAnswer()
    stdin, stdout = sys.__stdin__, sys.__stdout__
    if stdin is None or stdout is None or not _can_be_asked(stdin.fileno(), stdout.fileno()):
        yield answer
        return
    keyboard = stdin.fileno()
    before = termios.tcgetattr(keyboard)
    quiet = termios.tcgetattr(keyboard)
    quiet[0] &= ~termios.ICRNL  # keep Enter as it is for the app
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
        asks = not select.select([keyboard], [], [], 0)[0]
        if asks:
            os.write(stdout.fileno(), _QUESTION)
        yield answer
        if asks:
            said = _read_answer(keyboard)
            answer.background = background_of(said)
            answer.typed = _ANSWERS.sub(b"", said)
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


def _can_be_asked(keyboard: int, screen: int) -> bool:
    try:
        is_ours = os.isatty(screen) and os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        return False
    return is_ours and not _draws_lines_only() and os.environ["TERM"] != "linux"


def _read_answer(keyboard: int) -> bytes:
    """Read input until the terminal's last answer has arrived, or until the time is up. Return the input."""
    said, end = b"", time.monotonic() + _LONGEST_WAIT
    while not re.search(_KIND, said) and select.select([keyboard], [], [], max(0.0, end - time.monotonic()))[0]:
        data = os.read(keyboard, 4096)
        if not data:
            break
        said += data
    return said


def background_of(said: bytes) -> str:
    """Return ``light`` or ``dark`` for the color in an answer to OSC 11, or "" if ``said`` contains no such answer."""
    found = re.search(_COLOR, said)
    rgb = _RGB.fullmatch(found.group(1)) if found is not None else None
    if rgb is None:
        return ""
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in rgb.groups())
    return "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"


@dataclass
class LateAnswers:
    """Removes the terminal's answers to queries from the typed input, even if an answer arrives in parts."""

    _held: bytes = b""
    _held_since: float = 0.0

    @property
    def holds(self) -> bool:
        """Return whether some input is held back. If so, call `without` again soon, even if there is no new input."""
        return bool(self._held)

    def without(self, data: bytes) -> bytes:
        """Take new input, and return the keys in it, without answers of the terminal.

        If the input ends with the beginning of an answer, this part is held back until the rest arrives. If the part
        may also be a key (Escape), it is held back only until the next call without new input.
        """
        if data:
            self._held_since = time.monotonic()
        said, self._held = self._held + data, b""
        said = _ANSWERS.sub(b"", said)
        begun = _BEGUN.search(said)
        if begun is not None and (data or self._is_awaited(begun.group())):
            said, self._held = said[: begun.start()], begun.group()
        return said

    def _is_awaited(self, begun: bytes) -> bool:
        """Return whether ``begun`` can only be the beginning of an answer, and the rest may still arrive."""
        is_answer = re.match(rb"\x1b(?:\][0-9]+;|P[0-9>!]|_G)", begun) is not None
        return is_answer and time.monotonic() - self._held_since < _LONGEST_ANSWER


@dataclass
class Pastes:
    """Separates pasted text from typed keys, by the escape sequences of bracketed paste.

    Nothing inside a paste is a key.
    """

    _pasted: bytes | None = None  # the text so far of a paste that has begun but not ended

    def split(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """Yield the parts of the input in order, each as a pair: whether it was pasted, and its bytes.

        The mark at the beginning of a paste must arrive in one piece, which `LateAnswers` ensures. A paste is yielded
        in one piece once it is complete.
        """
        while data:
            if self._pasted is None:
                keys, begins, data = data.partition(_PASTE_BEGINS)
                self._pasted = b"" if begins else None
                if keys:
                    yield are_lines(keys), keys
            else:
                text, ends, data = (self._pasted + data).partition(_PASTE_ENDS)
                self._pasted = None if ends else text
                if ends:
                    yield True, text


def are_lines(keys: bytes) -> bool:
    """Return whether keys that arrived at the same time form several lines.

    Such keys are a paste, from a terminal that does not support bracketed paste.
    """
    return keys.count(b"\r") > 1 and b"\r" in keys.strip(b"\r") and not _NO_TEXT.search(keys)


def pasted_text(text: str) -> str:
    """Return pasted text without escape sequences. Line ends become newlines."""
    return _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
