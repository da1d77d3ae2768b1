"""Engines in processes of this machine, each with its own GPUs or its part of the cores.

Each process runs ``python -m minillm.jobs.engine_processes``. It receives a `Task` and then lists of rows through a
connection, sends answers back, and ends when the connection closes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from minillm import system
from minillm.errors import MinillmError, UsageError
from minillm.jobs.engines import Died, Engines, Facts, Task
from minillm.jobs.rows import Answer, InputRow
from minillm.parallel.placement import place
from minillm.progress import OnProgress, Progress, say


class EngineProcesses(Engines):
    """Runs each engine in a process of this machine.

    Args:
        report: called with the progress of loading of engine 0.
    """

    def __init__(self, task: Task, count: int, report: OnProgress) -> None:
        super().__init__(count)
        self._task, self._report = task, report
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}

    def __exit__(self, *raised: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def start(self, number: int) -> None:
        words = (*place(number, self.count, self._task.engine), *system.PYTHON, "-m", "minillm.jobs.engine_processes")
        connection, self._processes[number] = system.start_connected(words)
        self._connections[number] = Connection(connection.detach())
        self._send(number, self._task)

    def send(self, number: int, rows: list[InputRow]) -> None:
        self._send(number, rows)

    def receive(self) -> tuple[int, Facts | list[Answer] | Died | MinillmError]:
        while True:
            ready = wait(self._connections.values())[0]
            number = next(number for number, each in self._connections.items() if each is ready)
            try:
                message = self._connections[number].recv()
            except (EOFError, OSError):
                self._connections[number].close()
                return number, Died(system.exit_status(self._processes[number].wait()))
            if isinstance(message, str):
                say(message)
            elif not isinstance(message, Progress):
                return number, message
            elif number == 0 and not self.facts:
                self._report(message)

    def _send(self, number: int, value: Task | list[InputRow]) -> None:
        with suppress(OSError):  # the process has died; `receive` will report it
            self._connections[number].send(value)


def main() -> int:
    from minillm.jobs.row_engine import RowEngine  # not at the top: the process that starts the engines needs no torch
    from minillm.llm import LLM

    connection, lock = Connection(int(sys.argv[1])), threading.Lock()

    def send(value: Facts | list[Answer] | MinillmError | Progress | str) -> None:
        try:
            with lock:
                connection.send(value)
        except OSError:  # no one waits for the running rows
            os._exit(0)

    task: Task = connection.recv()
    try:
        llm = LLM(task.model, on_progress=send, on_message=send, **task.engine)
    except MinillmError as error:
        send((UsageError if isinstance(error, UsageError) else MinillmError)(str(error)))
        return error.exit_code
    engine = RowEngine(llm, task.style)

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                for row in connection.recv():
                    engine.submit(row)
        os._exit(0)

    send(engine.facts())
    threading.Thread(target=read, daemon=True).start()
    for answer in engine.work():
        send([answer])
    return 0


if __name__ == "__main__":
    sys.exit(main())
