"""Compile Hopper's prefill kernel for 9.0 on a machine without a GPU, and print: bytes of stack that registers spill
to, bytes of shared memory, matmul instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from minillm.kernels.attention import hopper_prefill


class Hopper:
    """Fake the driver of a GPU that this machine lacks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main() -> None:
    driver.set_active(Hopper())
    compiled = hopper_prefill.compile_ahead(torch.device("cpu"), torch.bfloat16, 128, window=4096)
    resources = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([resources, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    stack = max(map(int, re.findall(r"STACK:(\d+)", usage)))
    print(stack, compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))


if __name__ == "__main__":
    main()
