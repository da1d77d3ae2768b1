"""The standard streams, however the process was started: closed, full, or in an encoding that has few characters."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO


def settle() -> None:
    """Open what is closed, and let no character fail.

    Otherwise the next file that is opened gets a closed stream's number, and with it what libraries print. Closed input
    is empty here, what goes to a closed stderr is lost, and writing to a closed stdout fails.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free: the stream's own
            os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="backslashreplace")


def takes_utf8(stream: TextIO) -> bool:
    """Whether text is written to ``stream`` as UTF-8."""
    return codecs.lookup(stream.encoding or "utf-8").name == "utf-8"


def let_go(stream: TextIO) -> None:
    """Write what is left, or drop it where that fails: Python would try again at its end, and complain."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
