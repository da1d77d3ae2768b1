"""Test `deterministic`: the same tokens with other ops, and on a GPU bitwise reproducible results in every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lib.engine import engine_for, run
from lib.models import hf_model, ours
from minillm import LLM, BeamSearchParams, SamplingParams, kernels
from minillm.errors import UsageError

pytest.importorskip("triton")
from minillm.kernels.deterministic import OPS

REQUESTS: list[tuple[list[int], Any]] = [
    ([3, 14, 15, 92, 65, 35, 89, 79, 32], SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)),
    ([27, 18, 28], SamplingParams(max_tokens=6, n=2, temperature=0.8, seed=4, ignore_eos=True)),
    ([31, 41, 59, 26, 53], BeamSearchParams(max_tokens=5, beam_width=3)),
]


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_requests_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the tokens are those of the usual ops, in chunks, preempted, and forked."""
    monkeypatch.setattr(kernels.cpu, "packed_linear", lambda *_: None)  # weights as they lie on a GPU
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
    if kind == "Mistral":
        sizes["sliding_window"] = 6
    model = ours(hf_model(kind=kind, **sizes))
    expected = tokens(run(engine_for(model), REQUESTS))
    engine = engine_for(
        replace(model, ops=OPS),
        num_blocks=11,
        max_num_batched_tokens=8,
        admission="optimistic",
        on_device=True,
    )
    assert tokens(run(engine, REQUESTS)) == expected
    assert engine.scheduler.preemption.count


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"load_format": "dummy:q4_k_m"},
        {"load_format": "dummy:fp8"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "float16"},
    ],
    ids=["bfloat16", "q4_k_m", "fp8", "int8 KV", "float16"],
)
def test_the_same_bits_in_every_batch(config: dict[str, Any]) -> None:
    from lib.same_bits import requests_of, ways

    assert ways("smollm2-135m", requests_of(20, 40000, most_tokens=40, longest=700), **config)


@pytest.mark.gpu
def test_beams_in_every_batch() -> None:
    from lib.same_bits import beams

    assert beams("smollm2-135m")


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^deterministic needs a GPU: leave it out$"):
        LLM("smollm2-135m", load_format="dummy", device="cpu", deterministic=True)
