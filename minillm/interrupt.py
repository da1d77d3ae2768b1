"""ctrl-c between steps, never inside one: a half-done step would leave the books out of balance."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold KeyboardInterrupt back until the block ends. A second ctrl-c inside the block is not held back.

    Does nothing outside the main thread, and where somebody else handles SIGINT.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    caught = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt


def import_torch() -> None:
    """Import torch with ctrl-c held back: a KeyboardInterrupt inside its C++ initialisers would abort the process."""
    with deferred_interrupt():
        import torch  # noqa: F401
