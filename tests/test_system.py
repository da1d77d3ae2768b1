"""Test that freed memory returns to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

HOLES = """
import re
from pathlib import Path
import torch
from minillm.system import compact_heap

def megabytes() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1000

def every_other(size: int, count: int) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=torch.uint8) for _ in range(count)][::2]

before = megabytes()
with compact_heap():
    larger = every_other(2_000_000, 100)
    print(megabytes() - before)
    smaller = every_other(50_000, 2000)
print(megabytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone has holes to give back")
def test_a_compact_heap_has_no_holes(minillm_command: tuple[str, ...]) -> None:
    run = subprocess.run([*minillm_command, "-c", HOLES], capture_output=True, text=True, check=True)
    meanwhile, afterwards = map(int, run.stdout.split())
    assert meanwhile < 130, "100 MB are held, and some pages that are not full"
    assert afterwards < 180, "50 more"


def test_a_variable_that_torch_rejects_is_one_line() -> None:
    code = "from minillm.system import import_torch; from minillm.errors import UsageError\n"
    code += "try: import_torch()\nexcept UsageError as error: print(error)"
    environment = {**os.environ, "TORCH_LOGS": "garbage"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torch does not start: Invalid log settings: garbage; change or unset ")
    assert "TORCH_LOGS" in done.stdout


def test_garbage_is_not_searched_among_the_objects_of_torch() -> None:
    code = "import gc; from minillm.system import import_torch; import_torch(); collected = gc.get_stats()[2]\n"
    code += "print(collected['collections'], gc.get_freeze_count() > 100_000, gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 True True\n"
