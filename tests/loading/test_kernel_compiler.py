"""Test background compilation of kernels: into the cache, with one message at most, ended with the parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget

from lib.terminal import wait_until_gone
from minillm.kernels.launch import Variant
from minillm.loading import kernel_cache, kernel_compiler

SCRIPT = Path(__file__).with_name("compiling_kernels.py")


@pytest.fixture
def run(compiling: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs the script in an empty cache, and returns its results."""
    variables = {"TRITON_CACHE_DIR": "", "MINILLM_CACHE": str(tmp_path)}
    return lambda what, **more: json.loads(compiling(SCRIPT, what, **{**variables, **more}))


def test_variants_are_compiled_into_the_cache(run: Callable[..., Any]) -> None:
    first = run("compile")
    assert first == {"ended": True, "missing": 2, "left": 0, "done": 2, "pending": 0, "messages": []}
    second = run("compile")
    assert second == {**first, "missing": 0, "done": 0}


LAUNCH = """
import torch
from triton.runtime import build
from minillm.kernels.norm import rms_norm
from minillm.loading.kernel_compiler import KernelCompiler

def fail(*args, **options):
    raise SystemExit("a C compiler was started")

x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")
compiler = KernelCompiler(print, 2)
missing = compiler.missing(lambda: rms_norm.rms_norm(x, x[0], 1e-5))
compiler.submit(missing)
compiler.wait(missing)
build._build = fail
print(len(missing), rms_norm.rms_norm(x, x[0], 1e-5).sum().item())
"""


@pytest.mark.gpu
def test_the_first_launch_of_a_compiled_kernel_runs_no_c_compiler(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LAUNCH], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("1 256.0\n", "")


def test_without_compilers_kernels_compile_later(run: Callable[..., Any]) -> None:
    result = run("killed")
    (message,) = result.pop("messages")
    assert "ended of signal 9: kernels compile at their first use" in message
    assert result == {"ended": True, "missing": 2, "left": 2, "done": 0, "pending": 0}


def test_a_cache_that_cannot_be_written_is_replaced(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    result = run("compile", TRITON_CACHE_DIR=str(file / "below"))
    (message,) = result["messages"]
    assert message.startswith(f"{file / 'below'} cannot be written (Not a directory)")
    assert result["left"] == 0


def test_compilers_end_with_their_parent(run: Callable[..., Any]) -> None:
    left = run("die")
    assert len(left) >= 3
    for each in left:
        wait_until_gone(each)


class Process:
    """Stands for the compiling processes. Notes the variants that it gets, and says what the test says."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        reader, self._writer = os.pipe()
        self.stdin, self.stdout = self, os.fdopen(reader, "rb")

    def write(self, line: bytes) -> None:
        self.keys.append(Variant.decode(line).key)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._writer)

    def say(self, line: str) -> None:
        os.write(self._writer, f"{line}\n".encode())

    def wait(self) -> int:
        return 0

    def until(self, keys: str) -> None:
        deadline = time.monotonic() + 30
        while self.keys != list(keys):
            assert time.monotonic() < deadline, self.keys
            time.sleep(0.01)


def test_half_of_the_compilers_are_kept_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `relax`, all of them compile. The processes end when they have nothing to do."""
    process = Process()
    monkeypatch.setattr(kernel_compiler.subprocess, "Popen", lambda *_args, **_options: process)
    monkeypatch.setattr(kernel_compiler, "_UNUSED_SECONDS", 0.0)
    variants = {
        key: Variant(key, "module", "kernel", GPUTarget("cuda", 90, 32), ({}, {}, {}, {})) for key in "abcdefgh"
    }
    compiler = kernel_compiler.KernelCompiler(pytest.fail, 4)
    compiler.submit([variants[key] for key in "abcdef"])
    assert process.keys == [], "it is not ready"
    process.say("ready")
    process.until("abcd")
    compiler.relax()
    process.say("a")
    assert compiler.wait([variants["a"]], 30)
    compiler.submit([variants["g"]], urgent=True)
    process.until("abcdg")
    for key in "bc":
        process.say(key)
    assert compiler.wait([variants["c"]], 30)
    process.until("abcdg")
    process.say("d a reason")
    process.until("abcdge")
    for key in "gef":
        process.say(key)
        process.until("abcdgef")
    assert compiler.wait(seconds=30)
    while compiler._process is not None:
        time.sleep(0.01)


def test_unused_kernels_of_other_versions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    for name, days in (("older", 3), ("old", 2), ("recent", 1.5), ("today", 0.5)):
        mark = tmp_path / "kernels" / name / "used"
        mark.parent.mkdir(parents=True)
        mark.touch()
        os.utime(mark, (time.time() - days * 86400,) * 2)
    assert not kernel_cache.use_kernel_cache(pytest.fail)
    used = Path(os.environ["TRITON_CACHE_DIR"])
    assert used.parent == tmp_path / "kernels"
    assert {each.name for each in used.parent.iterdir()} == {"today", used.name}
    (used / "a kernel").mkdir()
    assert kernel_cache.use_kernel_cache(pytest.fail)
    assert os.environ["TRITON_CACHE_DIR"] == str(used)
