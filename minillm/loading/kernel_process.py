"""The process that `minillm.loading.kernel_compiler` starts. It compiles variants of kernels, several at a time.

Each line of stdin is a `Variant`. The first line of stdout is ``ready``. Each further line has the key of a finished
variant, followed by the error if compiling it has failed. The process ends with its parent, or when stdin ends.
"""

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial

from minillm.kernels import launch
from minillm.kernels.compat import prepare_compiler
from minillm.kernels.launch import Variant
from minillm.system import end_with_parent

_NICE = 10  # niceness of the process, so that other processes on the same cores are not slowed down
_LONGEST = 200  # maximum characters of an error


def main() -> None:
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not reach the parent
    end_with_parent()
    os.nice(_NICE)
    prepare_compiler()
    lock = threading.Lock()

    def report(variant: Variant, done: "Future[str]") -> None:
        problem = str(done.exception() or done.result()).strip().partition("\n")[0]
        with lock:
            results.write(f"{variant.key} {problem[:_LONGEST]}\n".encode())

    # Forked processes share the memory of torch and Triton.
    pool = ProcessPoolExecutor(int(sys.argv[1]), multiprocessing.get_context("fork"), initializer=end_with_parent)
    results.write(b"ready\n")
    for line in sys.stdin.buffer:
        variant = Variant.decode(line)
        pool.submit(_compile, variant).add_done_callback(partial(report, variant))
    os.killpg(0, signal.SIGKILL)  # and the assemblers that Triton has started


def _compile(variant: Variant) -> str:
    """Compile a variant. Return "" on success, else the error.

    The error is not raised anywhere: the variant's first launch fails again, and raises it.
    """
    launch.set_target(variant.target)
    try:
        variant.compile()
    except Exception as error:  # Triton may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
