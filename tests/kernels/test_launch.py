"""Test that a launch needs the variants found without a launch, and that another process can compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_variants_are_found_without_a_launch(tmp_path: Path) -> None:
    """Warnings are errors: Triton 3.9 warns if a launch does not decide about contraction."""
    script = Path(__file__).with_name("launching.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {
        "missing": ["_rms_norm_kernel", "_gated_kernel"],
        "before": [False, False],
        "refused": 1,
        "after": [True, True],
        "left": 0,
        "launch compiles": 0,
        "without contraction": ["_rms_norm_kernel"],
    }
