"""A process that has imported all modules and forks for each command, and the program that asks it.

The commands are those of `minillm`, and ``-m minillm.service`` for an engine process. A command then takes a tenth of a
second to start, where a new process takes three. Another process has imported only the scripted engine, and runs that.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

Run = Callable[[list[str]], int]  # run a command, return its exit code

_MOST = 1 << 20  # bytes of a command and its environment

PROGRAM = """#!{python} -ISE
import json, os, signal, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
asked.connect({address!r})
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(asked, [message], [0, 1, 2])
command = int(asked.recv(16))
signal.signal(signal.SIGINT, lambda number, _: os.kill(command, number))
sys.exit(int(asked.recv(16) or b"70"))
"""


@contextmanager
def program(path: Path, environment: Mapping[str, str] | None = None, *, is_scripted: bool = False) -> Iterator[None]:
    """Write the program ``path``, and run the process that it asks. ``is_scripted``: it runs the scripted engine."""
    address = f"{path}.socket"
    path.write_text(PROGRAM.format(python=sys.executable, address=address))
    path.chmod(0o755)
    command = [sys.executable, __file__, address, *["scripted"] * is_scripted]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()


def serve(address: str, run: Run) -> None:
    """Answer until this process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        asked, _ = listener.accept()
        if os.fork() == 0:
            _answer(asked, run)
        asked.close()


def _answer(asked: socket.socket, run: Run) -> None:
    """Run one command with the streams, the directory and the environment of the program that asks; then exit.

    The program passes SIGINT on, and gets the exit code when temporary files are removed. The interpreter is not
    taken apart: with torch in it, that takes longer than most commands. If the program is killed, so is the command.
    """
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        message, streams, _, _ = socket.recv_fds(asked, _MOST, 3)
        asked.send(str(os.getpid()).encode())
        arguments, directory, environment = json.loads(message)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        threading.Thread(target=lambda: asked.recv(1) or os._exit(code), daemon=True).start()
        code = run(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        asked.send(str(code).encode())
        os._exit(0)


def commands() -> Run:
    """Import the modules of `minillm`. Return the function that runs a command."""
    import torch

    import minillm.cli.generate
    import minillm.llm
    import minillm.service.sessions  # noqa: F401
    from minillm.cli.main import main
    from minillm.service.__main__ import main as run_engine

    torch.set_num_threads(1)

    def run(arguments: list[str]) -> int:
        if arguments != ["-m", "minillm.service"]:
            return main(arguments)
        sys.argv = arguments[1:]
        return run_engine()

    return run


def scripted_engine() -> Run:
    """Import the scripted engine. Return the function that runs it."""
    from lib.programs import fake_engine

    def run(arguments: list[str]) -> int:
        fake_engine.main()
        return 0

    return run


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve(sys.argv[1], scripted_engine() if sys.argv[2:] else commands())
