"""Check that ``deterministic`` requests on a GPU are bitwise reproducible in any batch.

    PYTHONPATH=tests python -m lib.same_bits [SHAPE] [NUMBER OF SEQUENCES] [OF WHICH ALONE]

Random weights have logits close to each other, so a different last digit soon changes a token. The check compares every
token and the log-probabilities of the best tokens, bit for bit.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from typing import Any

import torch

from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.outputs import RequestOutput

Result = list[tuple[Any, ...]]


def requests_of(
    count: int, vocab: int, *, most_tokens: int, longest: int, seed: int = 0
) -> list[tuple[list[int], Any]]:
    """Return prompts of mixed lengths with mixed parameters. Every third one starts with one of four prefixes."""
    rng = random.Random(seed)
    common = [[rng.randrange(vocab) for _ in range(rng.randrange(16, longest))] for _ in range(4)]
    found = []
    for number in range(count):
        prompt = [rng.randrange(vocab) for _ in range(int(longest ** rng.random()))]
        if number % 3 == 0:
            prompt = rng.choice(common) + prompt[:40]
        options: dict[str, Any] = {"max_tokens": rng.randrange(most_tokens // 2, most_tokens + 1), "logprobs": 2}
        kind = number % 5
        if kind == 0:
            options |= {"temperature": 0.0}
        elif kind == 1:
            options |= {"temperature": 0.9, "seed": number, "top_p": 0.9}
        elif kind == 2:
            options |= {"temperature": 1.1, "seed": number, "n": 2}
        elif kind == 3:
            options |= {"temperature": 0.7, "seed": number, "top_k": 40, "repetition_penalty": 1.1}
        else:
            options |= {"temperature": 0.0, "frequency_penalty": 0.4, "min_p": 0.02, "prompt_logprobs": 1}
        found.append((prompt, SamplingParams(**options, ignore_eos=True)))
    return found


def result_of(output: RequestOutput) -> Result:
    prompt = [(one.token_id, one.logprob, one.top) for one in output.prompt_logprobs or [] if one is not None]
    return [
        (prompt, each.token_ids, [(one.token_id, one.logprob, one.top) for one in each.logprobs or []])
        for each in output.outputs
    ]


def run(
    shape: str, requests: list[tuple[list[int], Any]], *, alone: bool = False, preempted: bool = False, **config: Any
) -> list[Result]:
    """Return the results of all requests at once, or of one after another. With ``preempted``, check that some were."""
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 4096, "enable_tuning": False} | config
    llm = LLM(shape, deterministic=True, **options)
    prompts, params = [prompt for prompt, _ in requests], [each for _, each in requests]
    if alone:
        outputs = [llm.generate([prompt], each)[0] for prompt, each in requests]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    count = sum(each.metrics.num_preemptions for each in outputs if each.metrics is not None)
    llm.close()
    del llm
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    assert not preempted or count, "nothing was preempted"
    return [result_of(each) for each in outputs]


def compare(name: str, expected: list[Result], got: list[Result]) -> bool:
    wrong = [number for number, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
    print(f"{name}: {len(got) - len(wrong)} of {len(got)} the same bits", wrong[:12], flush=True)
    return not wrong


def ways(shape: str, requests: list[tuple[list[int], Any]], **config: Any) -> bool:
    """Compare each request alone with all ways of batching."""
    begin = time.monotonic()
    lengths = [len(prompt) + each.max_tokens for prompt, each in requests]
    config = {"max_model_len": max(lengths)} | config
    expected = run(shape, requests, alone=True, max_num_seqs=2, enable_prefix_caching=False, **config)
    print(f"  {len(requests)} alone: {time.monotonic() - begin:.0f} s", flush=True)
    slots = [length * each.n for length, (_, each) in zip(lengths, requests, strict=True)]
    few = {
        "num_blocks": max(max(slots), sum(slots) // 3) // 16 + 8, "max_num_seqs": 64, "admission": "optimistic",
        "enable_prefix_caching": False, "preempted": True,
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "all at once": {},
        "steps of 600 tokens, 100 sequences": {"max_num_batched_tokens": 600, "max_num_seqs": 100},
        "chunks of 256": {"prefill_chunk": 256, "max_num_seqs": 128},
        "few blocks, swap": few,
        "few blocks, recompute": {**few, "preemption": "recompute"},
        "no graphs, no cache": {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 48},
        "guesses by lookup": {"speculate": "lookup", "max_num_seqs": 3},
        "blocks of 1": {"block_size": 1},
    }
    good = True
    for name, case in cases.items():
        good &= compare(name, expected, run(shape, requests, **config, **case))
    return good


def beams(shape: str) -> bool:
    """Compare beam searches alone with all of them batched with samples. Two have penalties."""
    rng = random.Random(5)
    requests: list[tuple[list[int], Any]] = []
    for number in range(6):
        options: dict[str, Any] = {"repetition_penalty": 1.2} if number < 2 else {}
        prompt = [rng.randrange(40000) for _ in range(rng.randrange(3, 200))]
        requests.append((prompt, BeamSearchParams(max_tokens=16, beam_width=2 + number % 3, logprobs=1, **options)))
    alone = run(shape, requests, alone=True, max_num_seqs=8, enable_prefix_caching=False)
    together = run(shape, [*requests, *requests_of(20, 40000, most_tokens=24, longest=500)])
    return compare("beams", alone, together[:6])


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    count, some = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else (0, 48)
    good = ways(shape, requests_of(some, 40000, most_tokens=64, longest=1500))
    for form in ("q4_k_m", "q8_0", "fp8"):
        print(form)
        good &= ways(shape, requests_of(20, 40000, most_tokens=40, longest=700), load_format=f"dummy:{form}")
    print("int8 KV")
    good &= ways(shape, requests_of(20, 40000, most_tokens=40, longest=700), kv_cache_dtype="int8")
    good &= beams(shape)
    if count:
        begin, requests = time.monotonic(), requests_of(count, 40000, most_tokens=256, longest=300, seed=1)
        first = run(shape, requests)
        print(f"{count} requests: {time.monotonic() - begin:.0f} s", flush=True)
        order = random.Random(2).sample(range(count), count)
        second = run(
            shape, [requests[i] for i in order], max_num_seqs=180, max_num_batched_tokens=1000, num_blocks=3500
        )
        good &= compare("in another order, steps of 1,000 tokens, few blocks", [first[i] for i in order], second)
        chosen = order[:100]
        alone = run(shape, [requests[i] for i in chosen], alone=True, max_num_seqs=2, enable_prefix_caching=False)
        good &= compare("alone", [first[i] for i in chosen], alone)
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
