"""Swap against recompute: what it costs to take one sequence off the device and to have it back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minillm.bench.table import shown
from minillm.cache import BlockManager
from minillm.config import BLOCK_SIZES
from minillm.engine.engine import Engine
from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.load import methods_for
from minillm.model.llama import Llama
from minillm.params import SamplingParams
from minillm.runner.runner import Runner

_RUNS = 5


@dataclass(frozen=True)
class SwapResult:
    """Milliseconds for a sequence of ``num_tokens`` tokens; its blocks are scattered over the pool."""

    block_size: int = shown("block size", "d")
    num_tokens: int = shown("tokens", "d")
    swap_out: float = shown("swap out ms", ".2f")
    swap_in: float = shown("swap in ms", ".2f")
    recompute: float = shown("recompute ms", ".1f")


def measure_swaps(model: Llama, num_tokens: int) -> Iterator[SwapResult]:
    """One line per block size. The recompute is one prefill of the sequence, at block size 16."""
    recompute = _prefill(model, num_tokens)
    for block_size in BLOCK_SIZES:
        blocks = -(-num_tokens // block_size)
        runner = Runner(model, 4 * blocks, block_size, num_host_blocks=blocks)
        where = torch.randperm(4 * blocks)[:blocks].tolist()
        out = [(block, host) for host, block in enumerate(where)]
        back = [(host, block) for block, host in out]
        runner.host_pool.save(out)  # allocates, and pins, the host's pool
        yield SwapResult(
            block_size,
            num_tokens,
            _milliseconds(lambda runner=runner, out=out: runner.host_pool.save(out), model.device),  # type: ignore[misc]
            _milliseconds(lambda runner=runner, back=back: runner.host_pool.restore(back), model.device),  # type: ignore[misc]
            recompute,
        )


def _prefill(model: Llama, num_tokens: int) -> float:
    blocks = num_tokens // 16 + 2
    scheduler, runner = Scheduler(BlockManager(blocks, 16), 1, num_tokens), Runner(model, blocks, 16)
    requests = Requests(scheduler, None, model.config.vocab_size, num_tokens + 1, frozenset())
    engine = Engine(runner, requests, methods_for(requests, runner))
    prompt = torch.randint(0, model.config.vocab_size, (num_tokens,)).tolist()

    def run() -> None:
        engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=1))
        while engine.has_work:
            engine.step()
        engine.take_finished()

    return _milliseconds(run, model.device, runs=3)


def _milliseconds(run: Callable[[], None], device: torch.device, runs: int = _RUNS) -> float:
    times = []
    for _ in range(runs + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])
