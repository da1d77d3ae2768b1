"""The build of torch that `make` installs: its commands are printed, not run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def steps(*settings: str, path: str = "") -> str:
    """The commands of an installation from nothing; ``path`` comes first where programs are looked for."""
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "--dry-run", "chat", "VENV=/none", *settings]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_an_index_that_is_given_is_taken() -> None:
    shown = steps("TORCH=torch==1.2", "TORCH_INDEX=there")
    assert 'install --no-compile --index-url "there" "torch==1.2"' in shown
    assert "uv" not in shown


def test_a_driver_gets_the_build_that_pip_takes(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    shown = steps(path=str(tmp_path))
    assert "for the NVIDIA driver" in shown
    assert "several GB" in shown
    assert "uv" not in shown


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="here is a driver")
def test_without_a_driver_a_build_with_nvidias_libraries_is_not_taken() -> None:
    shown = steps()
    if "no NVIDIA driver" not in shown:
        pytest.skip("here is a driver")
    assert shown.index("--dry-run") < shown.index("nvidia-") < shown.index("--torch-backend cpu")
    assert shown.index("no NVIDIA driver") < shown.index("0.2 GB") < shown.index("--dry-run")
