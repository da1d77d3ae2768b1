"""Test that a launch needs the variants found without a launch, and that another process can compile them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_variants_are_found_without_a_launch(python_with_torch: str, tmp_path: Path) -> None:
    """Warnings are errors: Triton 3.9 warns if a launch does not decide about contraction."""
    script = Path(__file__).with_name("launching.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python_with_torch, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {
        "missing": ["_rms_norm_kernel", "_gated_kernel"],
        "before": [False, False],
        "refused": 1,
        "after": [True, True],
        "left": 0,
        "unfinished": ["_rms_norm_kernel"],
        "launch compiles": 0,
        "without contraction": ["_rms_norm_kernel"],
    }


KEYS = """
import os
from minillm.kernels import launch
from minillm.kernels.attention import decode, prefill, shared
from minillm.kernels.linear.low_bit import unpack
modules = [decode, prefill, shared, unpack]
kernels = {f"{module.__name__} {name}": each.jit for module in modules for name, each in vars(module).items()
           if isinstance(each, launch.Kernel)}
for is_backward in (False, True):
    if os.fork() == 0:
        for name in sorted(kernels, reverse=is_backward):
            launch._hash_in_order(kernels[name])
        print({name: jit.cache_key for name, jit in kernels.items()}, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_a_kernel_has_the_same_key_whatever_was_compiled_before(python_with_torch: str) -> None:
    """Otherwise the next process, or the one that compiles ahead, would not find it in Triton's cache.

    (Without `_hash_in_order`, Triton 3.6 fails here, and 3.7 does not.)
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python_with_torch, "-c", KEYS], env=environment, capture_output=True, text=True, check=True)
    forward, backward = done.stdout.splitlines()
    assert forward == backward
    assert "_sequence_first_kernel" in forward
