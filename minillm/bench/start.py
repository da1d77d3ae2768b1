"""``start``: seconds from a fresh process to its first answer.

Each run is a process of its own. The first one finds no compiled kernel (an empty Triton cache); the later ones find
those of the first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minillm.bench.registry import NoOptions, shape, word
from minillm.bench.table import shown
from minillm.checks import integer
from minillm.errors import MinillmError, UsageError

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

    process: str = shown("process")  # "first" or "later"
    imports: float = shown("imports s", ".2f")
    load: float = shown("load s", ".2f")
    first_token: float = shown("first token s", ".2f")
    rest: float = shown("seven more s", ".2f")
    total: float = shown("total s", ".2f")


@dataclass(frozen=True)
class Options(NoOptions):
    shape: str | None = shape(None, "random weights in this shape (smollm2-135m)")
    model: str | None = word(None, "this model instead")
    device: str = word("auto", "where it runs: cpu, cuda", metavar="DEVICE")
    runs: int = integer(3, 1, 1000, help="processes after the first one")


def measure(options: Options) -> Iterator[StartResult]:
    """Start a first process, then ``runs`` later ones.

    Raises:
        MinillmError: a process failed; its last line says why.
    """
    if options.shape and options.model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    model: dict[str, Any] = {"model": options.model or options.shape or "smollm2-135m", "device": options.device}
    if options.model is None:
        model["load_format"] = "dummy"
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "TRITON_CACHE_DIR": directory}
        for number in range(options.runs + 1):
            arguments = [str(time.time()), json.dumps(model)]
            process = subprocess.run(
                [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, env=environment
            )
            if process.returncode:
                last = (process.stderr.strip().splitlines() or ["the process failed"])[-1]
                raise MinillmError(re.sub(r"^minillm\.errors\.\w+: ", "", last))
            seconds = json.loads(process.stdout.splitlines()[-1])
            imports, load, first, rest = seconds
            yield StartResult("later" if number else "first", imports, load, first, rest, sum(seconds))
