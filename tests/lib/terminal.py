"""A program on a pseudo-terminal: its output, byte for byte, and the state in which it leaves the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "lib" / "programs"
PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"  # of modules
CHAT = (sys.executable, str(PROGRAMS / "chat_with_fake.py"))
FORKING: list[Callable[[str], str]] = []  # the fixture ``forking``, set when the tests begin

# Modes that the app switches on, and must switch off again: (on, off).
MODES = {
    "alternate screen": (b"\x1b[?1049h", b"\x1b[?1049l"),
    "mouse clicks": (b"\x1b[?1000h", b"\x1b[?1000l"),
    "mouse movement": (b"\x1b[?1003h", b"\x1b[?1003l"),
    "mouse encoding": (b"\x1b[?1006h", b"\x1b[?1006l"),
    "focus reports": (b"\x1b[?1004h", b"\x1b[?1004l"),
    "bracketed paste": (b"\x1b[?2004h", b"\x1b[?2004l"),
    "hidden cursor": (b"\x1b[?25l", b"\x1b[?25h"),
}


def children(process: int) -> list[int]:
    """Return the ids of a process's children; none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def wait_until_gone(process: int) -> None:
    """Return once a process has ended; fails after a minute."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"{process} has not ended"
            time.sleep(0.05)


def waited_for_processor(process: int) -> float:
    """Return the seconds that a process's first thread was ready and did not run; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def process_facts(process: int) -> str:
    """Return a process's state, its processor time, and the kernel function in which it sleeps."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-80:]
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        sleeps = Path(f"/proc/{process}/wchan").read_text()
    except OSError:
        return f"process {process} has ended"
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return f"process {process} ({command}) is {fields[0]} in {sleeps or '?'} after {seconds:.1f} s of processor"


class Forked:
    """A chat that was forked by a process of `lib.programs.warm`; used like `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], terminal: int, environment: Mapping[str, str]) -> None:
        self.returncode: Any = None
        self._code = -signal.SIGKILL
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._asked.connect(str(Path(FORKING[0]("chat")).with_name("chat")))
        message = json.dumps([arguments, os.getcwd(), dict(environment)]).encode()
        socket.send_fds(self._asked, [message], [terminal] * 3)
        self.pid = int(self._asked.recv(16))

    def poll(self, seconds: float | None = 0) -> Any:
        while self.returncode is None and select.select([self._asked], [], [], seconds)[0]:
            if said := self._asked.recv(16):
                self._code = int(said)
            else:
                self._asked.close()
                self.returncode = self._code
        return self.returncode

    def wait(self) -> Any:
        return self.poll(None)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Session:
    """A running program; `output` is everything it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, master: int, slave: int) -> None:
        self.process = process
        self.output = b""
        self._typed = 0
        self._master, self._slave = master, slave
        self.before = termios.tcgetattr(slave)

    def read(self, seconds: float) -> bytes:
        """Read the output that comes within this time."""
        end = time.monotonic() + seconds
        start = len(self.output)
        while select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                break
            if not data:
                break
            self.output += data
        return self.output[start:]

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Read until ``text`` has been written since something was last typed.

        The texts of two waits after one input may come in either order: one redraw writes all of the screen.
        """
        wanted, end = text.encode(), time.monotonic() + seconds
        while wanted not in self.output[self._typed :]:
            assert time.monotonic() < end, f"{text!r} did not come; the last was {self.output[-600:]!r}"
            self.read(0.05)

    def wait_for_keys_taken(self) -> None:
        """Wait until the program reads raw keys, or has ended. Before, the terminal takes Ctrl+Q itself."""
        patience = self._patience(60)
        while self.process.poll() is None and termios.tcgetattr(self._slave)[0] & termios.IXON:
            assert next(patience), f"it does not take the terminal; {self._story()}"
            self.read(0.05)

    def type(self, text: str) -> None:
        self.type_bytes(text.encode())

    def type_bytes(self, data: bytes) -> None:
        self.read(0)
        self._typed = len(self.output)
        os.write(self._master, data)

    def quit(self) -> None:
        """Press Ctrl+Q, and once more if an answer is running or text is unsent."""
        self.type("\x11")
        self.read(0.5)
        if self.process.poll() is None:
            self.type("\x11")

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGWINCH)

    def end(self, seconds: float = 15) -> int:
        """Wait for the program's end. Return the exit code as a shell does. Fail if Python has printed a message.

        ``seconds`` excludes the time for which the program waits for a processor.
        """
        patience = self._patience(seconds)
        while self.process.poll() is None:
            assert next(patience), f"it does not end; {self._story()}"
            self.read(0.05)
        self.read(0.2)
        assert b"Exception ignored" not in self.output, self.output[-2000:]
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def _patience(self, seconds: float) -> Iterator[bool]:
        """Yield whether the program has run or slept for less than ``seconds`` since the first look."""
        began, starved = time.monotonic(), waited_for_processor(self.process.pid)
        while True:
            yield time.monotonic() - began - max(0.0, waited_for_processor(self.process.pid) - starved) < seconds

    def _story(self) -> str:
        """Return the last output, the number of unread keys, the processes, and the output of `state_dump`."""
        shown = self.output[-600:]
        waiting = struct.unpack("i", fcntl.ioctl(self._slave, termios.FIONREAD, b"\0" * 4))[0]
        processes = [self.process.pid, *children(self.process.pid)]
        facts = [f"{waiting} bytes of keys wait", *map(process_facts, processes)]
        before = len(self.output)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)  # kills a program that has nothing to tell, which is lost anyway
        end = time.monotonic() + 20
        while (
            self.process.poll() is None and time.monotonic() < end and b"commands that wait" not in self.output[before:]
        ):
            self.read(0.5)
        self.read(1)
        told = self.output[before:].decode("utf-8", "replace")
        return f"the last was {shown!r}; {'; '.join(facts)}; it told:\n{told}"

    def modes_left_on(self) -> list[str]:
        """Return the terminal modes that are still on, and "raw" if the line discipline has changed."""
        left = [name for name, (on, off) in MODES.items() if self.output.rfind(on) > self.output.rfind(off)]
        if termios.tcgetattr(self._slave)[:4] != self.before[:4]:
            left.append("raw")
        return left


@contextlib.contextmanager
def session(
    command: Sequence[str] = CHAT,
    *,
    size: tuple[int, int] = (100, 30),
    environment: Mapping[str, str] | None = None,
    typed_before: str = "",
) -> Iterator[Session]:
    """Run ``command`` on a terminal of ``size`` columns and rows; it is killed at the end if need be.

    Its conversations, configuration and temporary files are its own, unless ``environment`` says otherwise.
    ``typed_before``: keys that wait in the terminal when it starts; none of them is a signal.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as own:
        places = dict.fromkeys(("MINILLM_DATA", "MINILLM_CONFIG", "TMPDIR"), own)
        with _running(command, size, {**places, **(environment or {})}, typed_before) as running:
            yield running


@contextlib.contextmanager
def _running(
    command: Sequence[str], size: tuple[int, int], environment: Mapping[str, str], typed_before: str
) -> Iterator[Session]:
    master, slave = os.openpty()
    if typed_before:
        tty.setraw(slave)
        os.write(master, typed_before.encode())
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    # pytest-xdist sets LINES and COLUMNS, which would go before the terminal's own size.
    inherited = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    inherited = {**inherited, "TERM": "xterm-256color", "PYTHONPATH": PATH, **environment}
    process: subprocess.Popen[bytes] | Forked
    if tuple(command[:2]) == CHAT and not any(name.startswith("PYTHON") for name in environment):
        process = Forked(command[2:], slave, inherited)
    else:
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        process = subprocess.Popen(command, preexec_fn=own_terminal, env=inherited, **streams)
    running = Session(process, master, slave)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
