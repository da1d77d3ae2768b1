"""Engines in processes of this machine, each with its own GPUs or its part of the cores.

Each process runs ``python -m minillm.jobs.engine_processes``. It reads JSON objects from standard input, one per line:
first a `Task`, then rows. It writes answers to standard output. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self

from minillm.errors import MinillmError, UsageError
from minillm.jobs.engines import Engines, Facts, RowEngine, Task
from minillm.jobs.placement import place
from minillm.jobs.rows import Answer, InputRow, Style
from minillm.llm import LLM
from minillm.progress import OnProgress, Progress, say
from minillm.system import child_environment, exit_status
from minillm.text.safe import json_line, parse_json

# -P: a module of the current directory must not replace one of the standard library.
_COMMAND = (sys.executable, "-P", "-m", "minillm.jobs.engine_processes")


class EngineProcesses(Engines):
    """Runs each engine in a process of this machine, and restarts a process that dies.

    Leaving the ``with`` block kills all processes.
    """

    def __init__(self, task: Task, count: int, report: OnProgress) -> None:
        super().__init__(count)
        self._task, self._report = task, report
        self._news: queue.SimpleQueue[tuple[int, subprocess.Popen[bytes], Any]] = queue.SimpleQueue()
        self._commands = [[*place(number, count, task.engine), *_COMMAND] for number in range(count)]
        self._processes = [self._start(number) for number in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def send(self, number: int, rows: list[InputRow]) -> None:
        self._write(self._processes[number], *map(asdict, rows))

    def receive(self) -> tuple[int, list[Answer] | None]:
        while True:
            number, process, message = self._news.get()
            if process is not self._processes[number]:
                continue
            match message:
                case None:
                    self.facts.pop(number, None)
                    say(f"engine {number} has ended{exit_status(process.wait())}; another takes its rows")
                    self._processes[number] = self._start(number)
                    return number, None
                case {"progress": progress}:
                    self._report(Progress(**progress))
                case {"message": text}:
                    say(text)
                case {"failed": reason, "usage": is_usage}:
                    raise (UsageError if is_usage else MinillmError)(f"engine {number}: {reason}")
                case {"ready": facts}:
                    self.facts[number] = Facts(**facts)
                    if len({each.device for each in self.facts.values()}) > 1:
                        raise UsageError(f"engine {number} has found no GPU of its own: lower --replicas")
                    return number, []
                case answer:
                    return number, [answer]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._commands[number],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # only this process handles ctrl-c
        )
        threading.Thread(target=self._read, args=(number, process), daemon=True).start()
        self._write(process, {**asdict(self._task), "tells": number == 0 and not self.facts})
        return process

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line that the process has not finished
            for line in process.stdout:
                self._news.put((number, process, parse_json(line)))
        self._news.put((number, process, None))

    @staticmethod
    def _write(process: subprocess.Popen[bytes], *values: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died; `receive` will report it
            process.stdin.write(b"".join(json_line(value).encode() + b"\n" for value in values))
            process.stdin.flush()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not reach the other side as an answer
    lock = threading.Lock()

    def send(value: Mapping[str, Any]) -> None:
        data = json_line(value).encode() + b"\n"
        with lock:
            try:
                while data:
                    data = data[output.write(data) or 0 :]
            except BrokenPipeError:
                os._exit(0)

    task = parse_json(sys.stdin.buffer.readline() or b"null")
    if task is None:
        return 0

    def tell(progress: Progress) -> None:
        if task["tells"]:
            send({"progress": asdict(progress)})

    try:
        llm = LLM(task["model"], on_progress=tell, on_message=lambda text: send({"message": text}), **task["engine"])
    except MinillmError as error:
        send({"failed": str(error), "usage": isinstance(error, UsageError)})
        return error.exit_code
    engine = RowEngine(llm, Style(**task["style"]))

    def read() -> None:
        for line in sys.stdin.buffer:
            engine.submit(InputRow(**parse_json(line)))
        os._exit(0)  # no one waits for the running rows

    send({"ready": asdict(Facts.of(llm))})
    threading.Thread(target=read, daemon=True).start()
    for answer in engine.work():
        send(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
