"""The terminal before and after the app: the app's demands on it, and its return to the state before, in every case.

Textual restores the terminal when it ends by itself. On SIGTERM and SIGHUP it does not: the alternate screen, mouse and
focus reports, bracketed paste, the hidden cursor and raw mode would all stay. So these signals make the app end by
itself; where it cannot within `_PATIENCE` (it hangs, or the terminal is gone), a thread restores the terminal and ends
the process.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from minillm.errors import UsageError

_PATIENCE = 2.0  # seconds from a signal to the forced end
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Bracketed paste, mouse, focus reports, in-band resize and the Kitty keyboard off; wrapping on; then the main screen
# and the cursor.
_RESET = (
    "\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2048l\x1b[<u"
    "\x1b[?7h\x1b[?1049l\x1b[?25h\x1b[0m"
)


def is_plain_only() -> bool:
    """Whether there is no terminal to draw on: a pipe or a file on either side, or a terminal of lines only."""
    streams = (sys.__stdin__, sys.__stdout__)
    is_terminal = all(stream is not None and stream.isatty() for stream in streams)
    return not is_terminal or _draws_lines_only()


def check_terminal() -> None:
    """Raise UsageError unless the app can draw here and be typed at."""
    for stream, name in ((sys.__stdin__, "input"), (sys.__stdout__, "output"), (sys.__stderr__, "error")):
        if stream is None or not stream.isatty():
            problem = f"minillm chat needs a terminal, and standard {name} is none"
            raise UsageError(f"{problem}; run it in one, or with --plain")
    if _draws_lines_only():
        kind = os.environ.get("TERM", "")
        problem = f"minillm chat needs a terminal that can move its cursor, and TERM is {kind!r}"
        raise UsageError(f"{problem}; set TERM (xterm-256color, say), or use --plain")


def _draws_lines_only() -> bool:
    """Whether the terminal cannot move its cursor, or does not name its kind."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")


@contextlib.contextmanager
def ending_on_signals(leave: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP call ``leave(exit code)`` in the running event loop. To be
    entered inside the loop, from the main thread. A process that has not ended `_PATIENCE` later is ended.
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: the app is on its way out
            loop.call_soon_threadsafe(leave, code)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
