"""``start``: measure the seconds from the start of a process to its first answer."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from minillm.bench.table import NoOptions, shape, shown, weights, word
from minillm.checks import integer
from minillm.errors import MinillmError

_PROGRAM = """
import json, sys, time
moments = [float(sys.argv[1])]
import torch
moments.append(time.time())
from minillm import LLM, SamplingParams
with LLM(**json.loads(sys.argv[2])) as llm:
    moments.append(time.time())
    deltas = llm.stream([5] * 37, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(deltas)
    moments.append(time.time())
    list(deltas)
    moments.append(time.time())
print(json.dumps([after - before for before, after in zip(moments, moments[1:])]))
"""


@dataclass(frozen=True)
class StartResult:
    """The seconds that one process takes for each stage of its first answer.

    The stages: import torch, load the model, generate the first token, generate seven more.
    """

    process: str = shown("process")  # "first" or "later"
    imports: float = shown("imports s", ".2f")
    load: float = shown("load s", ".2f")
    first_token: float = shown("first token s", ".2f")
    rest: float = shown("seven more s", ".2f")
    total: float = shown("total s", ".2f")


@dataclass(frozen=True)
class Options(NoOptions):
    shape: str | None = shape(None, "random weights with these dimensions (default: smollm2-135m)")
    model: str | None = word(None, "use this model instead of random weights")
    device: str = word("auto", "cpu or cuda", metavar="DEVICE")
    runs: int = integer(3, 1, 1000, help="later processes, after the first one")


def measure(options: Options) -> Iterator[StartResult]:
    """Start a process that has to compile its kernels, then processes that find them compiled.

    Raises MinillmError if a process fails.
    """
    model = json.dumps({**weights(options.shape, options.model), "device": options.device})
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "TRITON_CACHE_DIR": directory}
        for number in range(options.runs + 1):
            command = [sys.executable, "-c", _PROGRAM, str(time.time()), model]
            process = subprocess.run(command, capture_output=True, text=True, env=environment)
            if process.returncode:
                last = (process.stderr.strip().splitlines() or ["the process failed"])[-1]
                raise MinillmError(re.sub(r"^minillm\.errors\.\w+: ", "", last))
            imports, load, first, rest = seconds = json.loads(process.stdout.splitlines()[-1])
            yield StartResult("later" if number else "first", imports, load, first, rest, sum(seconds))
