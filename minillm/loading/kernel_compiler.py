"""Compile variants of kernels before they are needed, in background processes with low priority, into Triton's cache.

A variant is a kernel with its constants and argument types. The compiling processes need no GPU. They end when the
engine closes or its process dies. If they fail, kernels are compiled at their first launch, as without this module.
"""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from minillm.kernels import launch
from minillm.kernels.launch import NotCompiledError, Variant
from minillm.loading.threads import quota
from minillm.model.kinds import one_layer_of_each_kind
from minillm.progress import OnMessage
from minillm.system import child_environment, exit_status

_UNUSED_SECONDS = 30.0  # the processes end when there was nothing to compile for this long
_MOST = 16  # maximum number of processes; each takes about 0.2 GB


def num_compilers() -> int:
    """Return the number of cores that are free now, without one for this process: from 1 to `_MOST`."""
    cores = min(len(os.sched_getaffinity(0)), quota())
    return max(1, min(_MOST, int(cores - os.getloadavg()[0]) - 1))


class KernelCompiler:
    """Compiles variants in other processes. The first variant starts these processes; `rest` and `close` end them.

    Args:
        on_message: called once if the processes fail.
        num_processes: the number of variants that are compiled at a time. After `relax`, variants that are not urgent
            use only half of the processes.
    """

    not_compiled: type[Exception] = NotCompiledError

    def __init__(self, on_message: OnMessage, num_processes: int | None = None) -> None:
        self._on_message, self.num_processes = on_message, num_processes or num_compilers()
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._queue: deque[Variant] = deque()
        self._sent: set[Variant] = set()
        self._done: set[Variant] = set()  # compiled, or impossible to compile
        self._urgent: set[Variant] = set()
        self._is_relaxed = False
        self._has_failed = False
        self._reads = False  # the process is ready for variants

    def missing(self, work: Callable[[], object]) -> list[Variant]:
        """Return the variants that must be compiled before ``work`` can run: see `launch.missing_variants`."""
        with one_layer_of_each_kind():
            return launch.missing_variants(work, self._unfinished())

    def only_compiled(self) -> AbstractContextManager[None]:
        """Return a context in which launches raise `not_compiled` instead of compiling: see `launch.only_compiled`."""
        return launch.only_compiled(self._unfinished())

    def _unfinished(self) -> frozenset[str]:
        with self._changed:
            return frozenset(each.key for each in self._sent)

    @property
    def num_pending(self) -> int:
        """The number of variants that are not compiled yet."""
        return len(self._queue) + len(self._sent)

    @property
    def num_done(self) -> int:
        return len(self._done)

    def is_pending(self, variants: Iterable[Variant]) -> bool:
        """Return whether one of ``variants`` is not compiled yet."""
        with self._changed:
            return not self._has_failed and not self._done.issuperset(variants)

    def start(self) -> None:
        """Start the compiling processes if they do not run. They need some seconds before they compile."""
        with self._changed:
            if self._process is None and not self._has_failed:
                self._start()

    def submit(self, variants: Iterable[Variant], *, urgent: bool = False) -> None:
        """Queue ``variants`` to be compiled. If a request waits for them (``urgent``), they are compiled first."""
        with self._changed:
            wanted = [each for each in variants if each not in self._done and each not in self._sent]
            if self._has_failed or not wanted:
                return
            queued = set(self._queue)
            if urgent:
                self._queue = deque(dict.fromkeys([*wanted, *self._queue]))
                self._urgent.update(wanted)
            else:
                self._queue.extend(each for each in wanted if each not in queued)
            if self._process is None:
                self._start()
            self._send()

    def wait(self, variants: Iterable[Variant] | None = None, seconds: float | None = None) -> bool:
        """Wait until ``variants`` (None: all) are compiled, or until the processes fail.

        Return False if neither happens within ``seconds``.
        """
        wanted = None if variants is None else set(variants)

        def is_done() -> bool:
            if self._has_failed:
                return True
            return not self.num_pending if wanted is None else self._done.issuperset(wanted)

        with self._changed:
            return self._changed.wait_for(is_done, seconds)

    def relax(self) -> None:
        """Leave half of the cores to other processes from now on, because requests may run."""
        self._is_relaxed = True

    def rest(self) -> None:
        """End the processes to free their memory, if nothing is left to compile. `submit` starts them again."""
        with self._changed:
            if self.num_pending == 0:
                self._end()

    def close(self) -> None:
        """End the processes. Nothing is compiled afterwards."""
        with self._changed:
            self._has_failed = True
            self._queue.clear()
            self._sent.clear()
            self._end()
            self._changed.notify_all()

    def _start(self) -> None:
        environment = child_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "minillm.loading.kernel_process", str(self.num_processes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # it ends its own process group
            )
        except OSError as error:
            self._fail(f"({error.strerror})")
            return
        threading.Thread(target=self._receive, args=(self._process,), daemon=True).start()

    def _send(self) -> None:
        """Send queued variants to the compiling processes, but only as many as are compiled at a time.

        Urgent variants are first in the queue. After `relax`, half of the processes are kept for them. Nothing is sent
        before the process is ready to read, because a full pipe would block this thread.
        """
        while self._queue and self._process is not None and self._reads:
            hurries = not self._is_relaxed or self._queue[0] in self._urgent
            if len(self._sent) >= (self.num_processes if hurries else max(1, self.num_processes // 2)):
                return
            variant = self._queue.popleft()
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(f"{variant.encode()}\n".encode())
                self._process.stdin.flush()
            except TypeError:  # the variant cannot be encoded; its first launch compiles it
                self._done.add(variant)
                continue
            except OSError:  # the process has ended: `_receive` reports it
                self._queue.appendleft(variant)
                return
            self._sent.add(variant)

    def _receive(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            key = line.partition(b" ")[0].strip().decode()
            with self._changed:
                self._reads |= process is self._process  # the process's first line says that it is ready
                done = [each for each in self._sent if each.key == key]
                self._sent.difference_update(done)
                self._done.update(done)
                self._send()
                self._changed.notify_all()
                if not self.num_pending:
                    timer = threading.Timer(_UNUSED_SECONDS, self.rest)
                    timer.daemon = True
                    timer.start()
        code = process.wait()
        process.stdout.close()
        with self._changed:
            if process is self._process:
                self._end()
                self._fail(f"ended{exit_status(code)}")

    def _fail(self, how: str) -> None:
        self._has_failed = True
        self._queue.clear()
        self._sent.clear()
        self._on_message(f"the process that compiles kernels ahead {how}: kernels compile at their first use")
        self._changed.notify_all()

    def _end(self) -> None:
        process, self._process, self._reads = self._process, None, False
        if process is not None and process.stdin is not None:
            with suppress(OSError):  # the process has ended without reading all of its pipe
                process.stdin.close()
