"""``start``: seconds from a fresh process to its first answer.

Each run is a process of its own. The first one finds no compiled kernel (an empty Triton cache); the later ones find
those of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minillm.errors import MinillmError

_PROGRAM = """
import json, sys, time
began = float(sys.argv[1])
import torch
imported = time.time()
from minillm import LLM, SamplingParams
options = json.loads(sys.argv[2])
with LLM(**options) as llm:
    loaded = time.time()
    prompt = [5] * 37
    deltas = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(deltas)
    first = time.time()
    count = sum(1 for _ in deltas)
    done = time.time()
print(json.dumps([imported - began, loaded - imported, first - loaded, done - first]))
"""


@dataclass(frozen=True)
class StartResult:
    """Seconds of one process: until torch is imported, the model loaded, the first token there, and seven more."""

    process: str  # "first" or "later"
    imports: float
    load: float
    first_token: float
    rest: float
    total: float


def measure(model: str, options: Mapping[str, Any], runs: int = 3) -> Iterator[StartResult]:
    """Start a first process, then ``runs`` later ones.

    Args:
        options: of EngineConfig.

    Raises:
        MinillmError: a process failed; its last line says why.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "TRITON_CACHE_DIR": directory}
        for number in range(runs + 1):
            arguments = [str(time.time()), json.dumps({"model": model, **options})]
            process = subprocess.run(
                [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, env=environment
            )
            if process.returncode:
                raise MinillmError((process.stderr.strip().splitlines() or ["the process failed"])[-1])
            seconds = json.loads(process.stdout.splitlines()[-1])
            imports, load, first, rest = seconds
            yield StartResult("later" if number else "first", imports, load, first, rest, sum(seconds))
