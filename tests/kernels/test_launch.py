"""Test that a launch needs the variants found without a launch, and that another process can compile them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_variants_are_found_without_a_launch(compiling: Callable[..., str]) -> None:
    """Warnings are errors: Triton 3.9 warns if a launch does not decide about contraction."""
    assert json.loads(compiling(Path(__file__).with_name("launching.py"))) == {
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
def test_a_kernel_has_the_same_key_whatever_was_compiled_before(compiling: Callable[..., str]) -> None:
    """Otherwise the next process, or the one that compiles ahead, would not find it in Triton's cache.

    (Without `_hash_in_order`, Triton 3.6 fails here, and 3.7 does not.)
    """
    forward, backward = compiling("-c", KEYS).splitlines()
    assert forward == backward
    assert "_sequence_first_kernel" in forward
