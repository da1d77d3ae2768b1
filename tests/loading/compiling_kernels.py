"""Compile kernels for a 9.0 that this machine lacks by a `KernelCompiler`, as the argument says. Print the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from minillm.kernels import launch
from minillm.kernels.norm import activation, rms_norm
from minillm.loading.kernel_cache import use_kernel_cache
from minillm.loading.kernel_compiler import KernelCompiler


def work() -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    rms_norm.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    activation.silu_mul(x)


def descendants(process: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return found + [each for child in found for each in descendants(child)]


def main() -> None:
    messages: list[str] = []
    use_kernel_cache(messages.append)
    launch.set_target(GPUTarget("cuda", 90, 32))
    compiler = KernelCompiler(messages.append, 2)
    missing = compiler.missing(work)
    if sys.argv[1] == "die":  # and leave the processes alone
        compiler.submit(missing)
        while len(descendants(os.getpid())) < 3:
            time.sleep(0.05)
        print(json.dumps(descendants(os.getpid())), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "killed":
        compiler.start()
        (process,) = descendants(os.getpid())
        os.kill(process, signal.SIGKILL)
        subprocess.run(["true"], check=True)
    compiler.submit(missing, urgent=True)
    compiler.submit(missing)
    ended = compiler.wait(missing, 120)
    result = {"ended": ended, "missing": len(missing), "left": len(compiler.missing(work)), "done": compiler.num_done}
    compiler.rest()
    while descendants(os.getpid()):
        time.sleep(0.05)
    print(json.dumps({**result, "pending": compiler.num_pending, "messages": messages}))


if __name__ == "__main__":
    main()
