"""Run mixed requests for minutes: compare every answer, check the bookkeeping, and find no leak."""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from typing import Any

import pytest
import torch

from lib.cache_checks import check, check_swap
from lib.engine import engine_for, run
from lib.models import DEVICE, hf_model, ours
from minillm.engine.engine import Engine
from minillm.model.llama import Llama
from minillm.params import BeamSearchParams, SamplingParams

SECONDS = float(os.environ.get("MINILLM_SOAK_SECONDS", "480"))
REQUESTS = int(os.environ.get("MINILLM_SOAK_REQUESTS", "20000"))
KINDS = 300  # different requests; each comes many times, always among different ones


def some_request(rng: random.Random, number: int, prefixes: list[list[int]]) -> tuple[list[int], Any]:
    start = rng.choice(prefixes) if rng.random() < 0.5 else []
    prompt = start[: rng.randint(0, len(start))] + [rng.randrange(3, 96) for _ in range(rng.randint(1, 40))]
    shared: dict[str, Any] = {
        "max_tokens": rng.randint(1, 40),
        "stop_token_ids": [rng.randrange(3, 96) for _ in range(rng.choice((0, 0, 3)))],
    }
    kinds: list[Any] = [
        SamplingParams(temperature=0, **shared),
        SamplingParams(temperature=0, logprobs=2, **shared),
        SamplingParams(seed=number, temperature=rng.choice((0.7, 1.5)), **shared),
        SamplingParams(seed=number, n=rng.randint(2, 5), top_p=0.9, top_k=rng.choice((0, 9)), **shared),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, **shared),
        SamplingParams(seed=number, min_p=0.05, logit_bias={7: 2.0}, **shared),
        BeamSearchParams(beam_width=rng.randint(2, 5), **shared),
    ]
    return prompt, rng.choice(kinds)


def expected_tokens(model: Llama, requests: list[tuple[list[int], Any]]) -> list[Any]:
    """Compute each request alone, eagerly, on a host that sends everything at every step."""
    answers = []
    for request in requests:
        [output] = run(engine_for(model, num_blocks=256, on_device=False), [request])
        answers.append([completion.token_ids for completion in output.outputs])
    return answers


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory() -> tuple[int, int]:
    """Bytes in tensors, and bytes taken from the device by everything on it: contexts, streams, graphs."""
    if DEVICE.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def drive(engine: Engine, rng: random.Random, requests: list[tuple[list[int], Any]], answers: list[Any]) -> None:
    running: dict[str, int] = {}
    aborted: set[str] = set()
    number = compared = wrong = steps = 0
    began = time.monotonic()
    device_bytes = taken_bytes = host_bytes = 0
    counted = False
    while running or time.monotonic() - began < SECONDS or number < REQUESTS:
        going_on = time.monotonic() - began < SECONDS or number < REQUESTS
        while going_on and len(running) < 40:
            kind = rng.randrange(KINDS)
            engine.add_request(str(number), *requests[kind])
            running[str(number)] = kind
            number += 1
        if rng.random() < 0.02:
            name = rng.choice(list(running))
            engine.abort(name)
            aborted.add(name)
        engine.step()
        steps += 1
        for output in engine.take_finished():
            kind = running.pop(output.request_id)
            assert output.error is None, output.error
            got = [completion.token_ids for completion in output.outputs]
            if output.request_id in aborted:
                continue
            compared += 1
            wrong += got != answers[kind]
        if steps % 500 == 0:
            check(engine.cache)
            check_swap(engine.scheduler.preemption.swap)
        if not counted and (time.monotonic() - began > SECONDS / 3 or number > REQUESTS / 3):
            counted, host_bytes = True, resident_bytes()
            device_bytes, taken_bytes = device_memory()
    scheduler = engine.scheduler
    print(f"{number} requests, {compared} compared, {wrong} differ, {steps} steps, {time.monotonic() - began:.0f} s")
    print(f"{scheduler.preemption.count} preemptions, {scheduler.preemption.swap.num_swapped_out} blocks swapped out")
    # A greedy choice between logits that differ only in the last bit may come out differently in another batch.
    assert wrong <= compared // 10_000
    check(engine.cache)
    assert engine.cache.num_free == engine.cache.num_blocks
    assert engine.scheduler.preemption.swap.num_free == engine.scheduler.preemption.swap.num_blocks
    assert engine.scheduler.preemption.count > number // 200
    if DEVICE.type == "cuda":
        gc.collect()
        at_the_end = device_memory()
        print(
            f"device memory in use: {device_bytes:,} -> {at_the_end[0]:,}; taken: {taken_bytes:,} -> {at_the_end[1]:,}"
        )
        assert at_the_end[0] <= device_bytes + (1 << 20), "device memory leaks"
    # On a CPU, oneDNN keeps a primitive for each of the first 1,024 shapes that it meets.
    assert resident_bytes() <= host_bytes + ((64 if DEVICE.type == "cuda" else 512) << 20), "host memory leaks"


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 4 + 600)
def test_soak() -> None:
    rng = random.Random(0)
    model = ours(hf_model())
    prefixes = [[rng.randrange(3, 96) for _ in range(48)] for _ in range(4)]
    requests = [some_request(rng, number, prefixes) for number in range(KINDS)]
    answers = expected_tokens(model, requests)
    engine = engine_for(
        model, num_blocks=220, host_blocks=200, max_num_seqs=48, max_num_batched_tokens=256, admission="optimistic"
    )
    drive(engine, rng, requests, answers)
