"""A process that has imported torch and forks for each `minillm` command, and the `minillm` program that asks it.

A command of a page then takes a tenth of a second to start, where a new process takes three.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch

import minillm.cli.generate
import minillm.llm  # noqa: F401
from minillm.cli.main import main

_MOST = 1 << 20  # bytes of a command and its environment

PROGRAM = """#!{python} -ISE
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
asked.connect({address!r})
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(asked, [message], [0, 1, 2])
sys.exit(int(asked.recv(16) or b"70"))
"""


def serve(address: str) -> None:
    """Answer until this process is killed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        asked, _ = listener.accept()
        if os.fork() == 0:
            _answer(asked)
        asked.close()


def _answer(asked: socket.socket) -> None:
    """Run one command with the streams, the directory and the environment of the program that asks; then exit.

    The program gets the exit code when temporary files are removed. The interpreter is not taken apart: with torch in
    it, that takes longer than most commands.
    """
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        message, streams, _, _ = socket.recv_fds(asked, _MOST, 3)
        arguments, directory, environment = json.loads(message)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        asked.send(str(code).encode())
        os._exit(0)


def write_program(path: Path, address: str) -> None:
    """Write the program `minillm` that asks the process at ``address``."""
    path.write_text(PROGRAM.format(python=sys.executable, address=address))
    path.chmod(0o755)


if __name__ == "__main__":
    serve(sys.argv[1])
