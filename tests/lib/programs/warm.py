"""Processes that have imported modules and fork for each command, and the programs that ask them.

A command then takes a tenth of a second to start, where a new process takes three. There are five kinds of process:

- ``scripted`` has imported the scripted engine, and runs it.
- ``chat`` has imported the chat app, and runs it with the scripted engine on a terminal. `lib.terminal` asks it.
- ``torch`` has imported torch alone. It runs Python files, and code after ``-c``, where kernels may be compiled.
- ``minillm`` runs the commands of `minillm`, code after ``-c``, and after ``-m`` the modules of its engines and ranks.
  Those of its commands are forks, too.
- ``worker`` has collected all tests, and runs the workers of pytest-xdist.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

Run = Callable[[list[str]], int]  # run a command, return its exit code

_MOST = 1 << 20  # bytes of a command and its environment

PROGRAM = """#!{python} -ISE
import json, os, signal, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
address = {address!r}
asked.connect(address)
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
streams = [0, 1, 2]
if sys.argv[-1].isdigit() and (sys.argv[1:3] == ["-P", "-m"] or len(sys.argv) == 2):
    streams.append(int(sys.argv[-1]))
socket.send_fds(asked, [message], streams)
for each in streams[3:]:
    os.close(each)
command = int(asked.recv(16))
link = f"{{address}}.{{os.getpid()}}"
os.path.lexists(link) and os.unlink(link)
os.symlink(str(command), link)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(command, number))
code = asked.recv(16) or os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(code))
"""


@contextmanager
def forking(directory: Path, *kinds: str, options: Sequence[str] = ()) -> Iterator[None]:
    """Run a process of each kind. `program` writes the programs that ask them.

    Args:
        directory: holds the sockets.
        kinds: in an order in which the imports of one are among those of the next.
        options: the options and paths of pytest, for ``worker``.
    """
    command = [sys.executable, __file__, str(directory), ",".join(kinds), *options]
    # A fork has no threads of its parent's OpenMP, but would wait for them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.stdin.close()
        process.wait()


def program(directory: Path, kind: str) -> Path:
    """Write a program that passes commands to the process of this kind, and return its path."""
    path = directory / f"{kind}-program"
    new = path.with_name(f"{path.name}-{os.getpid()}")
    new.write_text(PROGRAM.format(python=sys.executable, address=str(directory / kind)))
    new.chmod(0o755)
    return new.replace(path)


def process_of(program: int) -> int:
    """Return the id of the process that runs the command of a program, given the program's process id.

    The id of a process that is not such a program is returned as it is.
    """
    words = Path(f"/proc/{program}/cmdline").read_text().split("\0")
    link = f"{words[2].removesuffix('-program')}.{program}" if len(words) > 2 else ""
    return int(os.readlink(link)) if os.path.islink(link) else program


def serve(directory: Path, kinds: Sequence[str]) -> None:
    """Import the modules of each kind. Run commands until stdin is closed."""
    ready = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    for kind in kinds:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        run = KINDS[kind](directory)
        listener.bind(str(directory / kind))
        listener.listen()
        if kind == kinds[-1]:
            os.write(ready, b"ready\n")
        elif os.fork():
            listener.close()
            continue
        os.close(ready)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        gc.freeze()
        while 0 not in select.select([listener.fileno(), 0], [], [])[0]:
            asked, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                (_take_terminal if kind == "chat" else _answer)(asked, run)
            asked.close()
        os._exit(0)


def _answer(asked: socket.socket, run: Run) -> None:
    """Run one command with the streams, the directory and the environment of the program that asks; then exit.

    A module, or the scripted engine, gets the socket whose number is its last argument, under another number.

    The program passes SIGINT and SIGTERM on, and gets the exit code when temporary files are removed. The interpreter
    is not taken apart: with torch in it, that takes longer than most commands. If the program is killed, so is the
    command, and the reverse.
    """
    code = 70
    try:
        arguments, streams = _receive(asked)
        if streams[3:]:
            arguments[-1] = str(streams[3])
        threading.Thread(target=lambda: asked.recv(1) or os._exit(code), daemon=True).start()
        code = run(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        asked.send(str(code).encode())
        os._exit(0)


def _take_terminal(asked: socket.socket, run: Run) -> NoReturn:
    """Run one command on the terminal of the program that asks. Exit as a new process does."""
    arguments, streams = _receive(asked)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for each in streams:
        os.close(each)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore
    code = run(arguments)
    asked.send(str(code).encode())
    sys.exit(code)


def _receive(asked: socket.socket) -> tuple[list[str], list[int]]:
    """Take over the streams, the directory and the environment. Return the command and the streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    message, streams, _, _ = socket.recv_fds(asked, _MOST, 4)
    asked.send(str(os.getpid()).encode())
    arguments, directory, environment = json.loads(message)
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering)  # noqa: SIM115
        for number, mode, buffering in ((0, "r", -1), (1, "w", -1), (2, "w", 1))
    )
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    return arguments, streams


def scripted_engine(directory: Path) -> Run:
    """Import the scripted engine. Return the function that runs it."""
    from lib.programs import fake_engine

    def run(arguments: list[str]) -> int:
        sys.argv = ["fake_engine", *arguments]
        fake_engine.main()
        return 0

    return run


def chat(directory: Path) -> Run:
    """Import the chat app. Return the function that runs it with the scripted engine."""
    import minillm.ui.chat.markdown
    import minillm.ui.dialogs
    import minillm.ui.help  # noqa: F401
    from lib.programs import chat_with_fake

    def run(arguments: list[str]) -> int:
        sys.argv[1:] = arguments
        return chat_with_fake.start()

    return run


def python(arguments: list[str]) -> int:
    """Run code after ``-c``, or a file."""
    sys.argv = arguments if arguments[0] != "-c" else ["-c", *arguments[2:]]
    if sys.argv[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def torch_alone(directory: Path) -> Run:
    """Import torch. Return `python`."""
    import torch  # noqa: F401

    return python


def commands(directory: Path) -> Run:
    """Import the modules of `minillm`. Return the function that runs a command."""
    import torch

    from minillm import system

    system.PYTHON = (str(program(directory, "minillm")), "-P")

    import minillm.cli.generate
    import minillm.jobs.row_engine
    import minillm.llm
    import minillm.server.app
    import minillm.service.sessions  # noqa: F401
    from minillm.cli.main import main
    from minillm.jobs import engine_processes
    from minillm.loading import rank
    from minillm.service.__main__ import main as run_engine

    torch.set_num_threads(1)
    modules: dict[str, Callable[[], int | None]] = {
        "minillm.jobs.engine_processes": engine_processes.main, "minillm.loading.rank": rank.main,
        "minillm.service": run_engine,
    }  # fmt: skip

    def run(arguments: list[str]) -> int:
        if arguments[:1] == ["-c"]:
            return python(arguments)
        if arguments[:1] not in (["-m"], ["-P"]):
            return main(arguments)
        sys.argv = arguments[arguments.index("-m") + 1 :]
        return modules[sys.argv[0]]() or 0

    return run


def worker(directory: Path) -> Run:
    """Collect all tests, so that a worker finds their modules. Return the function that runs one."""
    import pytest

    pytest.main([*sys.argv[3:], "-n0", "--dist=no", "--collect-only", "-qq"])

    def run(arguments: list[str]) -> int:
        sys.argv = ["-c"]
        exec(arguments[-1], {"__name__": "__main__"})
        return 0

    return run


KINDS: dict[str, Callable[[Path], Run]] = {
    "scripted": scripted_engine, "chat": chat, "torch": torch_alone, "minillm": commands, "worker": worker,
}  # fmt: skip

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve(Path(sys.argv[1]), sys.argv[2].split(","))
