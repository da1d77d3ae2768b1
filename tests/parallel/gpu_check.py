"""Several ranks on GPUs, checked and measured by hand: ``python tests/parallel/gpu_check.py --sizes 2 4``.

pytest does not collect it: it needs several GPUs, and prints figures.

0. Sums of all sizes over N ranks are right, in one shot and by NCCL; both are timed.
1. `llama-8b` (or ``--shape``): latency at batch 1 and throughput, and the speed-up over one card. This comes before the
   engines of this process, which keep memory.
2. With ``--large``: a 70B shape loads and decodes.
3. The same tokens on N ranks as on one, float32, random weights: greedy, seeded samples, n = 4, penalties, beams, with
   CUDA graphs and without, and with a pool that preempts (swap and recompute).
4. A rank that is killed in the middle ends the run with its name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.loading.engine import Followers
from minillm.parallel.channel import RankDied
from minillm.params import Params


def requests(count: int) -> tuple[list[list[int]], list[Params]]:
    rng = random.Random(0)
    prompts, params = [], []
    for number in range(count):
        prompts.append([rng.randrange(3, 49152) for _ in range(rng.randint(3, 200))])
        length = rng.randint(20, 60)
        kinds: list[Params] = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
            SamplingParams(temperature=0.8, top_p=0.9, seed=number, max_tokens=length, ignore_eos=True),
            SamplingParams(temperature=1.0, n=4, seed=number, max_tokens=length, ignore_eos=True),
            SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=length, ignore_eos=True),
            BeamSearchParams(beam_width=4, max_tokens=length, ignore_eos=True),
        ]
        params.append(kinds[number % len(kinds)])
    return prompts, params


def check_sums(size: int) -> None:
    import torch
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=2), wait_for_workers=False)
    torch.multiprocessing.spawn(_sum_on_rank, (size, store.port), nprocs=size)


def _sum_on_rank(rank: int, size: int, port: int) -> None:
    import torch
    from torch.distributed import PrefixStore, TCPStore

    from minillm.kernels.all_reduce import all_reduce
    from minillm.kernels.streams import graph_microseconds
    from minillm.parallel.collectives import Ranks

    store = TCPStore("127.0.0.1", port, timeout=timedelta(minutes=2))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = Ranks(PrefixStore("sums", store), rank, size, device)
    sums = ranks._sums
    if sums is None:
        print(f"{size} ranks: NO WAY from one GPU's memory to another's", flush=True)
        return

    def part(number: int, of: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(1000 * number + of)
        return torch.randn(count, generator=generator, device=device).to(dtype)

    for exchange, name in zip(sums.exchanges, ("one shot", "two shots"), strict=False):
        wrong = taken = 0
        for number in range(300):
            dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
            count = random.Random(number).choice((2, 576, 4096, 4098, 33_000, 131_072, 262_144, 524_286))
            x = part(number, rank, count, dtype)
            if not exchange.takes(x):
                continue
            taken += 1
            got = all_reduce(x, exchange)
            exact = torch.stack([part(number, of, count, dtype).double() for of in range(size)]).sum(0)
            wrong += not torch.allclose(got.double(), exact, rtol=1e-2, atol=1e-2)
        if rank == 0:
            print(f"{size} ranks: {wrong} of {taken} sums in {name} are wrong", flush=True)
    x, in_order = part(0, rank, 5_000_000, torch.bfloat16), torch.zeros(5_000_000, device=device)
    for of in range(size):
        in_order += part(0, of, 5_000_000, torch.bfloat16)
    ranks.keep_order()
    same = torch.equal(ranks.all_reduce(x.clone()), in_order.bfloat16())
    ranks._sums = None
    same_by_all = torch.equal(ranks.all_reduce(x.clone()), in_order.bfloat16())
    ranks._sums, ranks._in_order = sums, False
    if rank == 0:
        print(f"{size} ranks: sums in their order, piece by piece {same}, by gathering {same_by_all}", flush=True)
    for kilobytes in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        x = torch.zeros(512 * kilobytes, device=device, dtype=torch.bfloat16)
        taking = [exchange for exchange in sums.exchanges if exchange.takes(x)]
        times = [graph_microseconds(lambda _, x=x, to=each: all_reduce(x, to), launches=40) for each in taking]  # type: ignore[misc]
        ranks._sums = None
        times.append(graph_microseconds(lambda _, x=x: ranks.all_reduce(x), launches=40))  # type: ignore[misc]
        ranks._sums = sums
        if rank == 0:
            shown = ", ".join(f"{microseconds:.1f}" for microseconds in times)
            print(f"{size} ranks, {kilobytes} kB: {shown} us (one shot, two shots, NCCL, as they can)", flush=True)
    torch.cuda.synchronize()


def check_tokens(sizes: list[int]) -> None:
    prompts, params = requests(40)
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": "cuda", "max_model_len": 1024}

    def tokens(**changes: Any) -> tuple[list[list[list[int]]], int]:
        llm = LLM("smollm2-135m", **{**options, "num_blocks": 2000, **changes})
        outputs = llm.generate(prompts, params)
        preemptions = llm.cache_stats().num_preemptions
        llm.close()
        return [[completion.token_ids for completion in output.outputs] for output in outputs], preemptions

    expected, _ = tokens()
    for size in sizes:
        for changes in (
            {},
            {"enforce_eager": True},
            {"num_blocks": 120, "admission": "optimistic"},
            {"num_blocks": 120, "admission": "optimistic", "preemption": "recompute"},
        ):
            began = time.monotonic()
            got, preemptions = tokens(tensor_parallel_size=size, **changes)
            same = sum(a == b for a, b in zip(got, expected, strict=True))
            print(
                f"{size} ranks, {changes or 'graphs'}: {same} of {len(expected)} requests have the same tokens, "
                f"{preemptions} preemptions, {time.monotonic() - began:.0f} s",
                flush=True,
            )


def check_death(size: int) -> None:
    llm = LLM("llama-1b", load_format="dummy", device="cuda", tensor_parallel_size=size)
    [followers] = llm.engine.runner.observers
    assert isinstance(followers, Followers)
    stream = llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True))
    for _ in range(20):
        next(stream)
    os.kill(followers.leader._lines.processes[size - 1].pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in stream:
            pass
        print("NOT NOTICED: the run went on to its end")
    except RankDied as error:
        print(f"noticed after {time.monotonic() - began:.1f} s: {error}", flush=True)


def bench(*arguments: str) -> Any:
    command = [sys.executable, "-m", "minillm", "bench", *arguments, "--device", "cuda", "--json"]
    home = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=home, env={**os.environ, "PYTHONPATH": home}
    )
    if result.returncode:
        print(f"FAILED with {result.returncode}: {' '.join(command)}", flush=True)
        return None
    return json.loads(result.stdout)


def measure(shape: str, sizes: list[int]) -> None:
    first: dict[str, float] = {}
    for size in sizes:
        for workload in ("latency", "throughput"):
            found = bench(workload, "--shape", shape, "--tensor-parallel-size", str(size))
            if found is None:
                continue
            rate = found[0]["decode_rate"] if workload == "latency" else found["rate"]
            first.setdefault(workload, rate)
            print(f"{shape}, {size} ranks, {workload}: {rate:,.1f} tok/s, {rate / first[workload]:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2], help="numbers of ranks (2)")
    parser.add_argument("--shape", default="llama-8b", help="what is measured (llama-8b)")
    parser.add_argument("--skip", nargs="*", default=[], choices=("sums", "tokens", "death", "speed"), help="leave out")
    parser.add_argument("--large", action="store_true", help="a 70B shape, too")
    arguments = parser.parse_args()
    if "sums" not in arguments.skip:
        for size in arguments.sizes:
            check_sums(size)
    if "speed" not in arguments.skip:
        measure(arguments.shape, [1, *arguments.sizes])
    if arguments.large:
        measure("llama-70b", arguments.sizes)
    if "tokens" not in arguments.skip:
        check_tokens(arguments.sizes)
    if "death" not in arguments.skip:
        check_death(max(arguments.sizes))


if __name__ == "__main__":
    main()
