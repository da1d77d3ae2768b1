"""Test ``allowed_token_ids`` and ``logits_processor`` against transformers' logits processors."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.engine import engine_for, run
from lib.models import DEVICE, hf_model, ours
from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.errors import MinillmError, UsageError

PARAMS: list[Any] = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.5, n=3, seed=5, max_tokens=9),
    SamplingParams(seed=6, frequency_penalty=0.5, max_tokens=9),
    BeamSearchParams(beam_width=3, max_tokens=7),
]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    theirs = hf_model(seed=3, vocab_size=97, max_position_embeddings=256).to(DEVICE)
    return theirs, ours(theirs)


def with_values(params: Any, **values: Any) -> Any:
    return type(params)(**{**vars(params), **values})


def parity(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Allow odd tokens after even ones, and even ones after odd ones, so the result depends on all arguments."""
    last = (prompt + output)[-1]
    changed = logits.clone()
    changed[last % 2 :: 2] = float("-inf")
    return changed


class Parity:
    """`parity`, as transformers calls it."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.count = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        pairs = zip(input_ids.tolist(), scores, strict=True)
        return torch.stack([parity(ids[: self.count], ids[self.count :], row) for ids, row in pairs])


@pytest.mark.parametrize("on_device", [False, True])
def test_a_processor_gives_the_tokens_of_transformers(models: tuple[Any, Any], on_device: bool) -> None:
    theirs, model = models
    for prompt in ([5, 9, 60], [4]):
        options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"logits_processor": [Parity(len(prompt))]}
        ids = torch.tensor([prompt], device=DEVICE)
        greedy = theirs.generate(ids, **options)[:, len(prompt) :].tolist()
        beams = theirs.generate(ids, num_beams=4, num_return_sequences=4, **options)[:, len(prompt) :].tolist()
        requests: list[Any] = [
            (prompt, SamplingParams(temperature=0, max_tokens=10, logits_processor=parity)),
            (prompt, BeamSearchParams(beam_width=4, max_tokens=10, logits_processor=parity)),
        ]
        outputs = run(engine_for(model, num_blocks=256, on_device=on_device), requests)
        assert [[c.token_ids for c in output.outputs] for output in outputs] == [greedy, beams]


@pytest.mark.parametrize("on_device", [False, True])
def test_only_allowed_tokens_are_said(models: tuple[Any, Any], on_device: bool) -> None:
    """Allowed tokens are drawn as if all others had a bias of -inf. Penalties still apply."""
    allowed = [7, 3, 50, 51, 3]
    barred = [[token_id] for token_id in range(97) if token_id not in allowed]
    requests = [([5, 9], with_values(params, allowed_token_ids=allowed)) for params in PARAMS]
    expected = [([5, 9], with_values(params, bad_words=barred)) for params in PARAMS]
    found = run(engine_for(models[1], num_blocks=256, on_device=on_device), requests)
    for output, same in zip(found, run(engine_for(models[1], num_blocks=256), expected), strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in same.outputs]
        assert {i for c in output.outputs for i in c.token_ids} <= set(allowed)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda prompt, output, logits: 1 / 0, "logits_processor: ZeroDivisionError: division by zero"),
        (lambda prompt, output, logits: logits[:5], r"must return a tensor \[97\], not \[5\]"),
        (lambda prompt, output, logits: None, r"must return a tensor \[97\], not NoneType"),
        (lambda prompt, output, logits: logits * float("nan"), "has left NaN"),
        (lambda prompt, output, logits: logits.fill_(float("-inf")), "no token that is possible"),
    ],
)
def test_a_failing_processor_fails_its_request_alone(
    models: tuple[Any, Any], params: Any, function: Any, said: str
) -> None:
    def late(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(output) < 3 else function(prompt, output, logits)

    requests = [([5, 9], each) for each in PARAMS]
    failing = ([5, 9], with_values(params, logits_processor=late))
    engine = engine_for(models[1], num_blocks=256)
    *others, failed = run(engine, [*requests, failing])
    alone = run(engine_for(models[1], num_blocks=256), requests)
    assert [[c.token_ids for c in o.outputs] for o in others] == [[c.token_ids for c in o.outputs] for o in alone]
    assert failed.error is not None
    assert re.search(said, failed.error)
    assert "\n" not in failed.error


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("params", PARAMS)
def test_what_is_impossible_stays_so_whatever_a_processor_says(
    models: tuple[Any, Any], params: Any, on_device: bool
) -> None:
    """The processor sees the allowed tokens, and cannot allow others."""
    seen: list[int] = []

    def upside_down(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(int(logits.isfinite().sum()))
        return torch.where(logits.isfinite(), logits, 99.0)

    values = {"allowed_token_ids": [5, 6, 7, 8], "bad_words": [[8]], "logits_processor": upside_down}
    [output] = run(
        engine_for(models[1], num_blocks=256, on_device=on_device), [([5, 9], with_values(params, **values))]
    )
    assert output.error is None
    assert {token_id for each in output.outputs for token_id in each.token_ids} <= {5, 6, 7}
    assert set(seen) == {3}

    def elsewhere(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(97, device=logits.device) == 9, 0.0, float("-inf"))

    params = with_values(params, **{**values, "logits_processor": elsewhere})
    [output] = run(engine_for(models[1], num_blocks=256, on_device=on_device), [([5, 9], params)])
    assert output.error is not None
    assert "no token that is possible" in output.error


@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[1], PARAMS[3]])
def test_where_nothing_is_possible_the_request_says_so(models: tuple[Any, Any], params: Any) -> None:
    impossible = with_values(params, allowed_token_ids=[5, 6, 7], no_repeat_ngram_size=1)
    fine, failed = run(engine_for(models[1], num_blocks=256), [([5, 9], params), ([5, 9], impossible)])
    assert fine.error is None
    assert failed.error is not None
    assert "no token is possible" in failed.error


def test_mixes_give_what_each_gives_alone_preempted_or_not(models: tuple[Any, Any]) -> None:
    rng = random.Random(4)
    model = ours(models[0], dtype=torch.float32 if DEVICE.type == "cuda" else torch.float64)
    for host_blocks in (0, 40):
        requests = []
        for _ in range(9):
            values: dict[str, Any] = {}
            if rng.random() < 0.6:
                values["allowed_token_ids"] = rng.sample(range(97), rng.randint(2, 40))
            if rng.random() < 0.5:
                values["logits_processor"] = lambda prompt, output, logits: logits - logits.roll(len(output)) / 4
            if rng.random() < 0.5:
                values["bad_words"] = [[rng.randrange(97), rng.randrange(97)] for _ in range(4)]
            prompt = [rng.randrange(3, 97) for _ in range(rng.randint(1, 20))]
            requests.append((prompt, with_values(rng.choice(PARAMS), **values)))
        engine = engine_for(model, num_blocks=22, max_num_seqs=8, host_blocks=host_blocks, admission="optimistic")
        together = run(engine, requests)
        for request, output in zip(requests, together, strict=True):
            [alone] = run(engine_for(model, num_blocks=256), [request])
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
        assert engine.scheduler.preemption.count, "nothing was preempted: the pool is too large for this test"


def test_wrong_ids_are_refused(models: tuple[Any, Any]) -> None:
    engine = engine_for(models[1])
    with pytest.raises(UsageError, match="allowed_token_ids: token id 97 is not below the vocabulary's size 97"):
        engine.add_request("a", [5], SamplingParams(allowed_token_ids=[5, 97]))
    with pytest.raises(UsageError, match="bad_words exclude every token of allowed_token_ids"):
        engine.add_request("b", [5], SamplingParams(allowed_token_ids=[5], bad_words=[[5], [6, 7]]))


def test_branches_take_them(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_blocks=64)
    with llm.branch("hello") as branch:
        said = branch.sample(SamplingParams(max_tokens=5, allowed_token_ids=[70, 71])).token_ids
        assert set(said) <= {70, 71}
        before = list(branch.token_ids)
        with pytest.raises(MinillmError, match="logits_processor: ValueError: no"):
            branch.sample(SamplingParams(max_tokens=5, logits_processor=refuse))
        assert branch.token_ids == before
        branch.sample(SamplingParams(max_tokens=5))
    assert llm.cache_stats().used_blocks == 0


def refuse(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")
