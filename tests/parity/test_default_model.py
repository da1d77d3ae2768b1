"""The real default weights in float32 against transformers on the same, dequantized weights.

All 24 prompts run in ``make parity``, a few of them in ``make test``, with fewer new tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.cache_checks import check
from lib.engine import engine_for, logits_in_chunks
from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.outputs import RequestOutput

PROMPTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
FEW = ("one-token", "code-python", "french", "emoji", "chat-question", "chat-forged")
NEW_TOKENS, FEW_TOKENS = 64, 24

pytestmark = pytest.mark.weights


def prompt_ids(llm: LLM, prompt: dict[str, Any]) -> list[int]:
    if "messages" in prompt:
        return llm.tokenizer.apply_chat_template(prompt["messages"])
    return llm.tokenizer.encode(prompt["prompt"])


def named(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [prompt for prompt in PROMPTS if prompt["name"] in names]


def cases() -> list[Any]:
    return [
        pytest.param(prompt, id=prompt["name"], marks=[] if prompt["name"] in FEW else [pytest.mark.parity])
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="session")
def greedy(request: pytest.FixtureRequest) -> SamplingParams:
    is_short = "not parity" in request.config.getoption("markexpr")
    return SamplingParams(temperature=0, max_tokens=FEW_TOKENS if is_short else NEW_TOKENS)


@pytest.fixture(scope="session")
def alone(llm: LLM, greedy: SamplingParams) -> Callable[[tuple[int, ...]], list[int]]:
    """Our greedy tokens for a prompt that is computed alone."""

    @functools.cache
    def tokens(ids: tuple[int, ...]) -> list[int]:
        return llm.generate(list(ids), greedy)[0].outputs[0].token_ids

    return tokens


@pytest.mark.parametrize("prompt", cases())
@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_transformers(
    llm: LLM, theirs: Any, alone: Callable[[tuple[int, ...]], list[int]], greedy: SamplingParams, prompt: dict[str, Any]
) -> None:
    """Tokens are greedy if each is the most probable one after those before it: one pass checks all of them."""
    ids = prompt_ids(llm, prompt)
    model = llm.engine.runner.model
    chunks = [512] * (len(ids) // 512) + ([len(ids) % 512] if len(ids) % 512 else [])
    got = logits_in_chunks(model, ids, chunks, block_size=16)
    chosen = alone(tuple(ids))
    expected = theirs(torch.tensor([ids + chosen])).logits[0]
    difference = float((got - expected[: len(ids)]).abs().max())
    print(f"{prompt['name']}: {len(ids)} tokens, largest difference of a logit {difference:.2e}")
    assert difference <= 1e-3
    assert chosen == expected[len(ids) - 1 : -1].argmax(-1).tolist()
    ends = [place for place, token in enumerate(chosen) if token in llm.engine.requests.eos_token_ids]
    assert ends == [len(chosen) - 1] or (not ends and len(chosen) == greedy.max_tokens)


@pytest.mark.parity
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["name"])
@torch.no_grad()
def test_generate_of_transformers_gives_the_same_tokens(
    llm: LLM, theirs: Any, alone: Callable[[tuple[int, ...]], list[int]], greedy: SamplingParams, prompt: dict[str, Any]
) -> None:
    ids = prompt_ids(llm, prompt)
    generated = theirs.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=greedy.max_tokens, do_sample=False,
        pad_token_id=2,
    )  # fmt: skip
    assert alone(tuple(ids)) == generated[0, len(ids) :].tolist()


def run(engine: Engine, prompts: list[list[int]], greedy: SamplingParams) -> tuple[list[list[int]], int]:
    """Greedy tokens of each prompt, computed together; and how often a request was preempted."""
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), ids, greedy)
    while engine.has_work:
        engine.step()
    check(engine.cache)
    assert engine.cache.num_free == engine.cache.num_blocks
    outputs: dict[str, RequestOutput] = {output.request_id: output for output in engine.take_finished()}
    preemptions = sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics)
    return [outputs[str(number)].outputs[0].token_ids for number in range(len(prompts))], preemptions


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="few"),
        pytest.param(tuple(prompt["name"] for prompt in PROMPTS), id="all", marks=pytest.mark.parity),
    ],
)
def test_alone_together_and_preempted_give_the_same_tokens(
    llm: LLM, alone: Callable[[tuple[int, ...]], list[int]], greedy: SamplingParams, names: tuple[str, ...]
) -> None:
    # The longest first: it is never preempted, and the later ones get the blocks that it leaves.
    prompts = sorted((prompt_ids(llm, prompt) for prompt in named(names)), key=len, reverse=True)
    expected = [alone(tuple(ids)) for ids in prompts]
    model = llm.engine.runner.model
    options: dict[str, Any] = {
        "block_size": 16,
        "max_num_batched_tokens": 512,
        "eos": llm.engine.requests.eos_token_ids,
    }
    together, _ = run(engine_for(model, num_blocks=1024, **options), prompts, greedy)
    assert together == expected
    longest = max(map(len, prompts)) + greedy.max_tokens
    tight = engine_for(model, num_blocks=-(-longest // 16) + 4, admission="optimistic", **options)
    preempted, preemptions = run(tight, prompts, greedy)
    assert preempted == expected
    assert preemptions > 0, "the pool was too large to test anything"
