"""Processes that can be killed, to run untrusted chat templates and tokenizers."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minillm.errors import WeightsError
from minillm.text.safe import clean_line

_QUIET = threading.Lock()  # all threads share stderr
_HELD = 1 << 14  # bytes: a request of this size fits into an empty pipe, so writing the request does not block
SECONDS = 5.0  # default time limit for an answer; the slowest known template takes 20 ms


class Sandbox:
    """A process that runs `minillm.text.sandbox_process` and answers requests.

    The first request starts the process. After a failure, the next request starts a new process.

    Args:
        subject: the kind of program that the process runs, "chat template" or "tokenizer".
        memory: maximum size of the process's address space, in bytes.
        first: a request that every new process gets before any other request.
    """

    def __init__(self, subject: str, memory: int, first: Mapping[str, Any] | None = None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._subject, self._first = subject, first
        # -P: a module of the current directory must not replace one of the standard library.
        self._command = [
            sys.executable,
            "-P",
            str(Path(__file__).with_name("sandbox_process.py")),
            subject,
            str(memory),
        ]
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a request and return the answer of the process.

        ``seconds`` is the time limit; None: `SECONDS`. Raises WeightsError if the process fails, exceeds the time
        limit, or needs more memory than it may use.
        """
        with self._lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    pipe = subprocess.PIPE
                    self.process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                    weakref.finalize(self, _end, self.process)
                    if self._first is not None:
                        self._exchange(self._first, 4 * SECONDS)
                return self._exchange(request, SECONDS if seconds is None else seconds)
            except BaseException:
                # An answer that arrives after ctrl-c must not be taken for the next one.
                if self.process is not None:
                    _end(self.process)
                self.process = None
                raise

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        process: Any = self.process
        data = json.dumps({**request, "seconds": seconds}).encode() + b"\n"
        writer = threading.Thread(target=_write, args=(process.stdin, data), daemon=True)
        is_short = len(data) <= _HELD
        if is_short:
            _write(process.stdin, data)
        else:
            writer.start()  # the process may not be reading yet
        line, deadline = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([process.stdout], [], [], left)[0]
            chunk = process.stdout.read1(1 << 20) if ready else b""
            if not chunk:
                late = not ready or time.monotonic() > deadline - 0.5
                reason = f"takes more than {seconds:.0f} seconds" if late else "crashed, or takes too much memory"
                raise WeightsError(f"the {self._subject} {reason}")
            line += chunk
        if not is_short:
            writer.join()
        answer: dict[str, Any] = json.loads(line)
        if "broken" in answer:
            raise WeightsError(f"the {self._subject}: {clean_line(str(answer['broken']), 300)}")
        return answer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the message that a library prints to stderr when it panics.

    The output of the ``with`` block to stderr is collected. It is printed at the end only if the block raises no
    exception.
    """
    with _QUIET, tempfile.TemporaryFile() as written:
        try:
            kept = os.dup(2)
        except OSError:  # stderr is closed
            yield
            return
        os.dup2(written.fileno(), 2)
        try:
            yield
            os.lseek(written.fileno(), 0, os.SEEK_SET)
            with contextlib.suppress(OSError):
                os.write(kept, written.read())
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _write(stream: Any, data: bytes) -> None:
    with contextlib.suppress(OSError):
        stream.write(data)
        stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    process.wait()
