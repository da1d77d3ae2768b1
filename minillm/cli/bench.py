"""``minillm bench``: a table of what was measured, or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from minillm.cli.options import engine_options
from minillm.errors import MinillmError, UsageError
from minillm.interrupt import import_torch

if TYPE_CHECKING:
    from minillm.llm import LLM


def run(arguments: argparse.Namespace) -> int:
    if arguments.workload == "ui":
        from minillm.ui.bench import run as run_ui  # the app's process never imports torch

        return run_ui(as_json=arguments.json)
    import_torch()
    workloads = {
        "latency": _latency,
        "serve": _serve,
        "share": _share,
        "profile": _profile,
        "matvec": _matvec,
        "chunk-attention": _chunk_attention,
        "kernels": _kernels,
        "memory": _memory,
        "host": _host,
    }
    return workloads.get(arguments.workload, _workload)(arguments)


def _shape(arguments: argparse.Namespace) -> str:
    """The shape that ``--shape`` names, or the smallest."""
    from minillm.model.shapes import SHAPES

    name: str = arguments.shape or "smollm2-135m"
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return name


def _check_scale(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.scale <= 1:
        raise UsageError(f"--scale must be above 0 and at most 1, not {arguments.scale}")


def _check_counts(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")


def _model(arguments: argparse.Namespace) -> tuple[LLM, str]:
    """The model that ``--shape`` or ``--model`` asks for, and its name."""
    if arguments.shape and arguments.model:
        raise UsageError("give either --shape (random weights) or --model (real ones), not both")
    from minillm.llm import LLM
    from minillm.progress import loading_bar, say

    options = engine_options(arguments)
    name = arguments.model or _shape(arguments)
    if not arguments.model:
        options["load_format"] = "dummy"
    with loading_bar() as report:
        return LLM(name, on_progress=report, on_message=say, **options), name


def _say_model(llm: LLM, what: str) -> None:
    model = llm.engine.runner.model
    ranks = "" if model.ranks is None else f", {model.ranks.size} ranks"
    print(f"{what}, {model.device}{ranks}, {str(model.dtype).removeprefix('torch.')}")


def _workload(arguments: argparse.Namespace) -> int:
    _check_scale(arguments)
    from minillm.bench.workloads import measure

    llm, name = _model(arguments)
    result = measure(llm, arguments.workload, name, arguments.scale)
    if arguments.json:
        print(json.dumps(asdict(result)))
        return 0
    _say_model(llm, f"{result.workload}: {name}, {result.num_requests} requests")
    idle = "" if result.idle_share is None else f"{result.idle_share:.1%}"
    for title, value in (
        ("tokens per second", f"{result.rate:,.0f}"),
        ("output tokens", f"{result.output_tokens:,}"),
        ("seconds", f"{result.seconds:.2f}"),
        ("first token, median", f"{1e3 * result.time_to_first_token:,.0f} ms"),
        ("per output token, median", f"{1e3 * result.time_per_output_token:.2f} ms"),
        ("floor by bytes and FLOPs", f"{result.floor_seconds:.2f} s, {result.fraction_of_floor:.0%} of it reached"),
        ("GPU idle between decode steps", idle),
        ("peak KV use", f"{result.peak_kv_tokens:,} token slots, {result.peak_kv_share:.0%} of the pool"),
        ("longest wait for a token", f"{1e3 * result.longest_wait:.1f} ms" if result.longest_wait else ""),
    ):
        if value:
            print(f"  {title:32}{value}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    _check_scale(arguments)
    if not 0 < arguments.rate <= 1e6:
        raise UsageError(f"--rate must be above 0, not {arguments.rate}")
    _check_counts(arguments, "num_requests")
    from minillm.bench.serve import measure

    llm, name = _model(arguments)
    measure(llm, 1e6, min(32, arguments.num_requests), arguments.scale)  # warm-up
    result = measure(llm, arguments.rate, arguments.num_requests, arguments.scale)
    if arguments.json:
        print(json.dumps(asdict(result)))
        return 0
    _say_model(llm, f"serve: {name}, {result.num_requests} requests at {result.rate:g} a second")
    print(f"  {'tokens per second':32}{result.output_rate:,.0f}")
    print(f"  {'':32}{'p50':>10}{'p90':>10}{'p99':>10}   ms")
    for title, values in (
        ("time to first token", result.time_to_first_token),
        ("time per output token", result.time_per_output_token),
        ("normalised latency", result.normalised_latency),
    ):
        print(f"  {title:32}" + "".join(f"{1e3 * value:>10.1f}" for value in values))
    return 0


def _share(arguments: argparse.Namespace) -> int:
    _check_scale(arguments)
    _check_counts(arguments, "num_requests")
    from torch.distributed import DistError

    from minillm.bench.share import measure
    from minillm.parallel.launch import Torchrun

    if Torchrun.from_environment() is None:
        raise UsageError("bench share: torchrun starts the replicas (torchrun --nproc-per-node 4 -m minillm bench …)")
    llm, name = _model(arguments)
    try:
        result = measure(llm, arguments.num_requests, arguments.scale)
    except DistError:  # torchrun's store, which the first node has
        raise MinillmError("the first node is gone, and what the others measured with it") from None
    if result is None:
        return 0
    if arguments.json:
        print(json.dumps(asdict(result)))
        return 0
    _say_model(llm, f"share: {name}, {result.num_requests} requests, {result.num_replicas} replicas")
    print(f"  {'tokens per second':32}{result.rate:,.0f}")
    print(f"  {'output tokens':32}{result.output_tokens:,}")
    print(f"  {'seconds':32}{result.seconds:.2f}")
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    _check_counts(arguments, "batch_size", "context")
    from minillm.bench.profile import measure

    llm, name = _model(arguments)
    profile = measure(llm, arguments.batch_size, arguments.context)
    if arguments.json:
        print(json.dumps(asdict(profile)))
        return 0
    title = f"profile: {name}, {profile.batch_size} sequences of {profile.context} tokens"
    _say_model(llm, f"{title}, {profile.step_microseconds:.0f} us a step")
    print(f"  {'kernel':50}{'launches':>9}{'a layer':>9}{'us':>9}{'MB':>9}{'of copy speed':>15}")
    for row in profile.kernels:
        size = "" if row.bytes is None else f"{row.bytes / 1e6:.0f}"
        fraction = "" if row.fraction is None else f"{row.fraction:.0%}"
        print(
            f"  {row.kernel:50}{row.launches:>9.1f}{row.launches_per_layer:>9.2f}{row.microseconds:>9.1f}"
            f"{size:>9}{fraction:>15}"
        )
    return 0


def _matvec(arguments: argparse.Namespace) -> int:
    import torch

    from minillm.bench.matvec import measure
    from minillm.model.shapes import SHAPES
    from minillm.model.shard import shard_of

    shape = SHAPES[_shape(arguments)]
    if not torch.cuda.is_available():
        raise UsageError("bench matvec needs a GPU")
    from minillm.kernels.matvec import MOST_TOKENS

    _check_counts(arguments, "tensor_parallel_size", "tokens")
    if arguments.tokens > MOST_TOKENS:
        raise UsageError(f"--tokens must be at most {MOST_TOKENS}, not {arguments.tokens}: more are cuBLAS's")
    results = []
    for result in measure(shard_of(shape, 0, arguments.tensor_parallel_size).local(shape), arguments.tokens):
        results.append(result)
        if not arguments.json:
            print(
                f"{result.op:10}{result.features:>7} x {result.columns:<7} floor {result.floor:>7.1f} us   "
                f"cuBLAS {result.cublas:>7.1f}   ours {result.ours:>7.1f}   tile {result.tile}, "
                f"recorded {result.recorded}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
    return 0


def _chunk_attention(arguments: argparse.Namespace) -> int:
    from minillm.bench.chunk_attention import measure

    results = []
    for result in measure():
        results.append(result)
        if not arguments.json:
            print(
                f"prompt {result.prompt:>5}, completion {result.completion:>5}   "
                f"us: paged, copied {result.copied:.1f}, shared {result.shared:.1f}, prefix {result.ours:.1f}   "
                f"speed-up {result.speedup:.1f}, {result.speedup_over_shared:.1f}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
    return 0


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

    name = _shape(arguments)
    if not 1 <= arguments.num_tokens <= SHAPES[name].max_position_embeddings:
        raise UsageError(f"--num-tokens must be from 1 to {SHAPES[name].max_position_embeddings}")
    books = []
    for line in memory.measure():
        books.append(line)
        if not arguments.json:
            print(f"{line.table:20}{line.lengths:16}{line.setting:38}{line.value:>8.1%}", flush=True)
    if arguments.model:
        chooser = LLM(arguments.model, **engine_options(arguments))
        for lengths in (memory.ALPACA, memory.SHAREGPT):
            for width in (2, 4, 6):
                value = memory.model_beam_saving(chooser, lengths, width)
                setting = f"{width} beams of {arguments.model}"
                books.append(memory.MemoryResult("saved by sharing", lengths.name, setting, value))
                if not arguments.json:
                    print(f"{'saved by sharing':20}{lengths.name:16}{setting:38}{value:>8.1%}", flush=True)
    llm = LLM(name, load_format="dummy", num_blocks=8, preemption="recompute", **engine_options(arguments))
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
    _check_counts(arguments, "batch_size", "input_len", "output_len")
    from minillm.bench.latency import measure
    from minillm.bench.peers import transformers_peer

    llm, name = _model(arguments)
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
    _say_model(llm, f"latency: {arguments.batch_size} x ({arguments.input_len} in, {arguments.output_len} out)")
    columns = (("decode tok/s", 14), ("ms/token", 10), ("first ms", 10), ("all tok/s", 11), ("floor tok/s", 13))
    print(" " * 32 + "".join(f"{title:>{width}}" for title, width in columns) + f"{'of floor':>10}{'GPU idle':>10}")
    for result in results:
        idle = "" if result.idle_share is None else f"{result.idle_share:.1%}"
        print(
            f"{result.name:32}{result.decode_rate:>14.1f}{1e3 * result.time_per_output_token:>10.2f}"
            f"{1e3 * result.time_to_first_token:>10.0f}{result.overall_rate:>11.1f}{result.floor_rate:>13.1f}"
            f"{result.fraction_of_floor:>10.0%}{idle:>10}"
        )
    return 0
