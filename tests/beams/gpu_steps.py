"""Beam steps against sample steps on a GPU, kernel by kernel, and a wide search: ``python tests/beams/gpu_steps.py``.

Random weights of the 135m shape, 32 rows of 8 prompts: milliseconds a step by turns, then where a step's time goes
(torch's profiler): launches, their grids, and microseconds. At last 64 prompts at width 16, with a line each second,
and the stack where a step takes longer than 15. It ends within 85 s.
"""

from __future__ import annotations

import faulthandler
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from minillm.llm import LLM
from minillm.params import BeamSearchParams, SamplingParams

LIMIT = 85  # seconds
STEPS, TRACED = 100, 6
SAMPLES = SamplingParams(n=4, temperature=0.7, seed=0, ignore_eos=True, max_tokens=1500)
BEAMS = BeamSearchParams(beam_width=4, n=1, ignore_eos=True, max_tokens=1500)


def say(*words: Any) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s ", *words, flush=True)


def add(engine: Any, count: int, params: Any, name: str) -> list[str]:
    rng = random.Random(0)
    names = [f"{name} {number}" for number in range(count)]
    for each in names:
        engine.add_request(each, [rng.randrange(40000) for _ in range(256)], params)
    return names


def end(engine: Any) -> None:
    for each in list(engine.requests.groups):
        engine.abort(each)
    engine.carry_out_aborts()
    while engine.has_work:
        engine.step()
    engine.take_finished()


def steps(engine: Any, params: Any) -> float:
    """Seconds of a step of 32 rows that all decode."""
    names = add(engine, 8, params, "step")
    while min(engine.requests.groups[each].sequences[0].num_output_tokens for each in names) < 16:
        engine.step()
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    return (time.monotonic() - began) / STEPS


def traced(engine: Any) -> list[tuple[float, float, str, str]]:
    """(microseconds, launches, kernel, grids) a step, of the requests that run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begins = sorted(each["ts"] for each in kernels if "_begin_decode" in each["name"])
    times, grids = defaultdict[str, list[float]](list), defaultdict[str, set[str]](set)
    for each in kernels:
        if begins[0] <= each["ts"] < begins[-1]:
            name = re.sub(r"void |at::native::|[<(].*", "", each["name"])[:44]
            times[name].append(each["dur"])
            grid = each["args"].get("grid")
            grids[name].add("x".join(map(str, grid)) if grid else "-")
    count = len(begins) - 1
    rows = [(sum(t) / count, len(t) / count, name, " ".join(sorted(grids[name])[:3])) for name, t in times.items()]
    return sorted(rows, reverse=True)


def main() -> None:
    llm = LLM("smollm2-135m", load_format="dummy", max_model_len=2048, pool_tokens=200_000)
    engine: Any = llm.engine
    found = defaultdict[str, list[float]](list)
    kinds: dict[str, Any] = {"samples": SAMPLES, "beams": BEAMS}
    for turn in range(4):  # the first one compiles
        for kind, params in kinds.items():
            seconds = steps(engine, params)
            if turn:
                found[kind].append(seconds)
            if turn == 3:
                rows = traced(engine)
                took, launched = sum(us for us, *_ in rows), sum(count for _, count, *_ in rows)
                say(f"{kind}: {took:.0f} us of kernels, {launched:.0f} launches a step")
                for us, launches, name, grid in rows[:18]:
                    print(f"    {us:8.1f} us {launches:6.1f}  {name:44} {grid}")
            end(engine)
    for kind, times in found.items():
        each = ", ".join(f"{1e3 * one:.3f}" for one in times)
        say(f"{kind}: {1e3 * statistics.median(times):.3f} ms a step ({each})")
    wide(engine)


def wide(engine: Any) -> None:
    params = BeamSearchParams(beam_width=16, n=1, ignore_eos=True, max_tokens=128)
    add(engine, 64, params, "wide")
    began = told = time.monotonic()
    number = tokens = 0
    while engine.has_work:
        faulthandler.dump_traceback_later(15)
        before = time.monotonic()
        engine.step()
        faulthandler.cancel_dump_traceback_later()
        number, now = number + 1, time.monotonic()
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.take_finished())
        if now - told > 1 or now - before > 0.5:
            told = now
            running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
            say(f"width 16: step {number}, {running} run, {waiting} wait, the last step took {now - before:.3f} s")
    took = time.monotonic() - began
    say(f"width 16, 64 prompts: {number} steps in {took:.1f} s, {tokens / took:.0f} tokens of the best beam a second")


BEGAN = time.monotonic()
if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT - 3)
    signal.alarm(LIMIT)
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU")
    main()
