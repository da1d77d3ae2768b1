"""Compile two kernels in another process for a 9.0 that this machine lacks. Print each step's results as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress

import torch
from triton.backends.compiler import GPUTarget

from minillm.kernels import launch
from minillm.kernels.norm import activation, rms_norm

COMPILER = """
import sys
from minillm.kernels import launch
variants = [launch.Variant.decode(line) for line in sys.stdin]
launch.set_target(variants[0].target)
for variant in variants:
    variant.compile()
"""


def entries() -> list[str]:
    return sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "AnnAssign")  # Python 3.13 warns about Triton 3.8
    launch.set_target(GPUTarget("cuda", 90, 32))
    x, weight = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)

    def work() -> None:
        rms_norm.rms_norm(x, weight, 1e-5)
        activation.silu_mul(x)
        rms_norm.rms_norm(x, weight, 1e-5)

    missing = launch.missing_variants(work)
    before = [variant.is_compiled for variant in missing]
    refused = 0
    with launch.only_compiled():
        try:
            work()
        except launch.NotCompiledError:
            refused += 1
    lines = "".join(f"{variant.encode()}\n" for variant in missing)
    strict = [sys.executable, "-W", "error", "-W", "ignore:AnnAssign"]
    subprocess.run([*strict, "-c", COMPILER], input=lines, text=True, check=True)
    after, compiled = [variant.is_compiled for variant in missing], entries()
    unfinished = launch.missing_variants(work, {missing[0].key})
    left = launch.missing_variants(work)
    with suppress(AttributeError):  # the launch itself, which needs a driver
        rms_norm.rms_norm(x, weight, 1e-5)
    launched = entries()
    other = launch.missing_variants(
        lambda: rms_norm._rms_norm_kernel[(4,)](
            x, x, weight, 64, 1e-5, SIZE=64, TILE=64, ADD=False, PDL=False, num_warps=1, enable_fp_fusion=False
        )
    )
    found = {
        "missing": [each.name for each in missing],
        "before": before,
        "refused": refused,
        "after": after,
        "left": len(left),
        "unfinished": [each.name for each in unfinished],
        "launch compiles": len(launched) - len(compiled),
        "without contraction": [each.name for each in other],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
