"""``minillm bench``: a table of what was measured, or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from minillm.cli import ENGINE_OPTIONS, given
from minillm.errors import UsageError
from minillm.interrupt import import_torch


def run(arguments: argparse.Namespace) -> int:
    import_torch()
    workloads = {"latency": _latency, "kernels": _kernels, "memory": _memory, "host": _host}
    return workloads[arguments.workload](arguments)


def _host(arguments: argparse.Namespace) -> int:
    from minillm.bench import host

    results = host.measure()
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
        return 0
    for result in results:
        print(f"{result.what:55}{result.microseconds:>10.0f} us")
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    from minillm.bench import memory, swap
    from minillm.llm import LLM
    from minillm.model.shapes import SHAPES

    name = arguments.shape or "smollm2-135m"
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    if not 1 <= arguments.num_tokens <= SHAPES[name].max_position_embeddings:
        raise UsageError(f"--num-tokens must be from 1 to {SHAPES[name].max_position_embeddings}")
    books = []
    for line in memory.measure():
        books.append(line)
        if not arguments.json:
            print(f"{line.table:20}{line.lengths:16}{line.setting:38}{line.value:>8.1%}", flush=True)
    llm = LLM(name, load_format="dummy", num_blocks=8, preemption="recompute", **given(arguments, ("device",)))
    if not arguments.json:
        device = llm.engine.runner.model.device
        print(f"swap against recompute, {arguments.num_tokens} tokens, {name}, {device}, milliseconds")
        print(f"{'block size':>10}{'swap out':>12}{'swap in':>12}{'recompute':>12}")
    moves = []
    for move in swap.measure(llm.engine.runner.model, arguments.num_tokens):
        moves.append(move)
        if not arguments.json:
            print(
                f"{move.block_size:>10}{move.swap_out:>12.2f}{move.swap_in:>12.2f}{move.recompute:>12.1f}", flush=True
            )
    if arguments.json:
        lines = {"books": [asdict(line) for line in books], "swap": [asdict(move) for move in moves]}
        print(json.dumps(lines))
    return 0


def _kernels(arguments: argparse.Namespace) -> int:
    from minillm.bench import kernels

    limits = kernels.measure_limits()
    if not arguments.json:
        print(
            f"limits: copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s "
            "(bfloat16, measured in this run)"
        )
        print(f"{'op':24}{'shape':34}{'us':>9}{'MB':>9}{'GFLOP':>9}{'limit':>9}{'of it':>7}{'error':>10}")
    results = []
    for result in kernels.run(limits, arguments.op):
        results.append(result)
        if not arguments.json:
            error = "" if result.error is None else f"{result.error:.1e}"
            print(
                f"{result.op:24}{result.shape:34}{result.microseconds:>9.1f}{result.bytes / 1e6:>9.1f}"
                f"{result.flops / 1e9:>9.1f}{result.bound:>9}{result.fraction:>7.0%}{error:>10}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"limits": asdict(limits), "results": [asdict(result) for result in results]}))
    return 0


def _latency(arguments: argparse.Namespace) -> int:
    for name in ("batch_size", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    if arguments.shape and arguments.model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    from minillm.bench.latency import measure
    from minillm.bench.peers import transformers_peer
    from minillm.commands.progress import loading_bar, say
    from minillm.llm import LLM
    from minillm.model.shapes import SHAPES

    options = given(arguments, ENGINE_OPTIONS)
    name = arguments.model or arguments.shape or "smollm2-135m"
    if not arguments.model:
        if name not in SHAPES:
            raise UsageError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
        options["load_format"] = "dummy"
    with loading_bar() as report:
        llm = LLM(name, on_progress=report, on_message=say, **options)
    results = measure(
        llm,
        name=name,
        batch_size=arguments.batch_size,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        peer=transformers_peer if arguments.peer else None,
    )
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
        return 0
    model = llm.engine.runner.model
    print(
        f"latency: {arguments.batch_size} x ({arguments.input_len} in, {arguments.output_len} out), "
        f"{model.device}, {str(model.dtype).removeprefix('torch.')}"
    )
    columns = (("decode tok/s", 14), ("ms/token", 10), ("first ms", 10), ("all tok/s", 11), ("floor tok/s", 13))
    print(" " * 32 + "".join(f"{title:>{width}}" for title, width in columns) + f"{'of floor':>10}")
    for result in results:
        print(
            f"{result.name:32}{result.decode_rate:>14.1f}{1e3 * result.time_per_output_token:>10.2f}"
            f"{1e3 * result.time_to_first_token:>10.0f}{result.overall_rate:>11.1f}{result.floor_rate:>13.1f}"
            f"{result.fraction_of_floor:>10.0%}"
        )
    return 0
