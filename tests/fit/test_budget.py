"""Test the forecast of a device's memory against the code that sizes the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lib.checkpoints import LLAMA_1B, LLAMA_8B
from minillm.config import EngineConfig
from minillm.fit.budget import EFFICIENCY, GPU_STEP_TOKENS, Budget
from minillm.fit.weights import Layout, Weights, expected_tensors, weights_in_memory
from minillm.kernels import LayerCache
from minillm.loading.pool_size import activation_bytes, size_pool
from minillm.model.config import ModelConfig
from minillm.model.llama import Batch, Llama
from minillm.model.rope_config import RopeConfig
from minillm.weights.shape import Shape
from minillm.weights.stored import StoredTensor

GIB = 1 << 30
Q4 = weights_in_memory(expected_tensors(LLAMA_8B, 4_920_739_232), Layout(2))
FULL = weights_in_memory(expected_tensors(LLAMA_8B, 16_060_556_376), Layout(2))


def gpu(gib: float, **options: Any) -> Budget:
    return Budget(int(gib * GIB), int(gib * GIB), True, 2, EngineConfig(**options))


def cpu(gib: float, **options: Any) -> Budget:
    return Budget(int(gib * GIB), int(gib * GIB), False, 4, EngineConfig(**options))


@pytest.mark.parametrize(
    ("weights", "gib", "fits", "fits_conversation"),
    [(Q4, 6, False, False), (Q4, 8, True, True), (FULL, 16, False, False), (FULL, 24, True, True)],
)
def test_an_8b_fits_where_one_expects_it(weights: Weights, gib: float, fits: bool, fits_conversation: bool) -> None:
    found = gpu(gib).fit(weights, LLAMA_8B)
    assert (found.fits, found.fits_conversation) == (fits, fits_conversation)
    assert (found.context > 0) == fits


def test_the_parts_add_up_to_no_more_than_there_is() -> None:
    for gib in (7.5, 8, 12, 24, 80):
        budget = gpu(gib)
        found = budget.fit(Q4, LLAMA_8B)
        used = Q4.memory + found.copied + found.steps + found.context * LLAMA_8B.kv_bytes_per_token(2)
        assert used <= budget.available == int(gib * GIB - gib * GIB * (1 - 0.9))
        if found.context < LLAMA_8B.context:
            assert used + 17 * LLAMA_8B.kv_bytes_per_token(2) > budget.available, "a block more would not fit"
    assert gpu(80).fit(Q4, LLAMA_8B).context == LLAMA_8B.context, "never more than the model's own"


@pytest.mark.parametrize("make", [gpu, cpu])
def test_a_cache_in_8_bits_holds_more_by_what_a_token_takes_less(make: Callable[..., Budget]) -> None:
    """K of 128 numbers and a scale takes 132 bytes, not 256 or 512."""
    wide, narrow = (make(12, kv_cache_dtype=form, pool_tokens=1 << 30) for form in ("auto", "int8"))
    size = wide.element_size
    assert narrow.kv_bytes_per_token(LLAMA_8B) == LLAMA_8B.kv_bytes_per_token(size) * 132 // (128 * size)
    few, more = (budget.fit(Q4, LLAMA_8B) for budget in (wide, narrow))
    room = few.context * wide.kv_bytes_per_token(LLAMA_8B) + few.steps - more.steps
    assert more.context == pytest.approx(min(LLAMA_8B.context, room / narrow.kv_bytes_per_token(LLAMA_8B)), abs=64)


def test_a_context_in_8_bits_that_a_prompt_unpacks_has_room_on_a_gpu() -> None:
    """K and V of a layer for the longest sequence there can be, where they are more than the products of a step."""
    row = LLAMA_8B.kv_bytes_per_token(2) // LLAMA_8B.layers  # 4,096 bytes
    for left, tokens, options in (
        (4 * GIB, 4 * GIB // (LLAMA_8B.kv_bytes_per_token(1) + row), {}),  # all that can lie beside what it unpacks to
        (100 * GIB, LLAMA_8B.context, {}),
        (100 * GIB, 20_000, {"max_model_len": 20_000}),
        (100 * GIB, 30_000, {"pool_tokens": 30_000}),
        (GIB, 40_000, {"num_blocks": 2_500}),
        (100 * GIB, LLAMA_8B.context, {"tensor_parallel_size": 2}),
    ):
        wide, narrow = (gpu(8, kv_cache_dtype=form, **options) for form in ("auto", "int8"))
        assert tokens <= narrow.longest_context(LLAMA_8B, left) < tokens + 16
        more = narrow.step_bytes(LLAMA_8B, 512, left) - wide.step_bytes(LLAMA_8B, 512, left)
        ranks = narrow.config.tensor_parallel_size
        activations = 512 * (4 * LLAMA_8B.hidden + 2 * LLAMA_8B.heads // ranks * LLAMA_8B.head_dim) * 2
        logits = 256 * LLAMA_8B.vocabulary * 14
        unpacked = narrow.longest_context(LLAMA_8B, left) * row // ranks
        assert more == max(0, activations + unpacked - logits)
    short = [
        gpu(8, kv_cache_dtype=form, max_model_len=2000).step_bytes(LLAMA_8B, 8192, GIB) for form in ("auto", "int8")
    ]
    assert short[0] == short[1], "the product of a long step takes more, and later"
    on_cpu = [cpu(8, kv_cache_dtype=form).step_bytes(LLAMA_8B, 512, GIB) for form in ("auto", "int8")]
    assert on_cpu[0] == on_cpu[1]
    in_float32 = [replace(gpu(8, kv_cache_dtype=form), element_size=4) for form in ("auto", "int8")]
    assert len({budget.step_bytes(LLAMA_8B, 512, 100 * GIB) for budget in in_float32}) == 1


def test_the_step_that_is_measured_unpacks_as_much_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of any step, of sequences no longer than the longest and of no more tokens, fit where its did."""
    chunked_prefill = pytest.importorskip("minillm.kernels.attention.prefill")
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *device: 0)
    steps: list[Batch] = []
    cache = LayerCache(
        *(torch.zeros(1, 16, 1, 64, dtype=torch.int8) for _ in "kv"), *(torch.zeros(1, 1, 16) for _ in "kv")
    )

    def forward(batch: Batch, pool: object) -> torch.Tensor:
        steps.append(batch)
        return torch.zeros(1, 10)

    def unpacked(tokens: int, tables: torch.Tensor, lens: torch.Tensor) -> int:
        pages = cache.pages(tables, lens)
        return chunked_prefill.capacity_for(torch.zeros(tokens, 2, 64, dtype=torch.bfloat16), pages)

    model = SimpleNamespace(
        device=torch.device("cpu"), rotary=SimpleNamespace(dynamic=False), forward=forward,
    )  # fmt: skip
    monkeypatch.setattr("minillm.loading.pool_size.new_kv_cache", lambda *_: torch.zeros(1))
    activation_bytes(cast("Llama", model), 1000, 4, 20_000)
    (step,) = steps
    measured = unpacked(len(step.token_ids), step.block_tables, step.context_lens)
    assert measured >= 20_000
    for lengths, tokens in (([20_000], 1000), ([20_000], 300), ([512, 20_000, 100], 1000), ([300] * 3, 1000)):
        width = -(-max(lengths) // 16)
        assert (
            0 < unpacked(tokens, torch.zeros(len(lengths), width, dtype=torch.int32), torch.tensor(lengths)) <= measured
        )


def test_a_copy_in_16_bits_is_kept_where_it_is_a_small_part() -> None:
    """An 8B's copy of matrices and head has 15 GB. Weights in 16 bits or FP8, and CPUs, have no copy."""
    assert Q4.copied == pytest.approx(15.0e9, rel=0.03)
    assert FULL.copied == 0
    assert weights_in_memory(expected_tensors(LLAMA_8B, 16_060_556_376), Layout(2, quantize="fp8")).copied == 0
    assert weights_in_memory(expected_tensors(LLAMA_8B, 16_060_556_376), Layout(2, quantize="int8")).copied > 13e9
    assert [gpu(gib).fit(Q4, LLAMA_8B).copied for gib in (24, 40, 70, 80)] == [0, 0, Q4.copied, Q4.copied]
    assert gpu(24, weights="both").fit(Q4, LLAMA_8B).copied == Q4.copied
    assert not gpu(16, weights="both").fit(Q4, LLAMA_8B).fits
    assert gpu(80, weights="stored").fit(Q4, LLAMA_8B).copied == 0
    assert cpu(80, weights="both").fit(Q4, LLAMA_8B).copied == 0
    plenty = gpu(70, weights="stored").fit(Q4, LLAMA_8B).context
    assert gpu(70, num_blocks=400_000 // 16).fit(Q4, LLAMA_8B).copied == 0, "the pool that is asked for goes before it"
    assert plenty == gpu(70).fit(Q4, LLAMA_8B).context == LLAMA_8B.context


def test_more_memory_never_leaves_less_context() -> None:
    for make in (gpu, cpu):
        contexts = [make(gib / 4).fit(Q4, LLAMA_8B).context for gib in range(16, 160)]
        falls = [(a, b) for a, b in pairwise(contexts) if b < 0.65 * a]
        assert not falls, "a larger step may take some of it, but not all"
        assert contexts[0] == 0
        assert contexts[-1] > 30_000


def test_steps_are_shorter_where_memory_is_short() -> None:
    tokens = [gpu(8).step_tokens(LLAMA_8B, int(gib * GIB)) for gib in (0, 3, 5, 8, 100)]
    assert tokens == sorted(tokens)
    assert tokens[0] == min(GPU_STEP_TOKENS)
    assert tokens[-1] == 8192
    assert gpu(8, max_num_batched_tokens=3000).step_tokens(LLAMA_8B, 0) == 3000, "asked for is asked for"
    assert gpu(8, max_num_seqs=1500).step_tokens(LLAMA_8B, 0) == 1500
    assert cpu(8).step_tokens(LLAMA_8B, 0) == 512
    assert gpu(8).step_bytes(LLAMA_8B, 512, GIB) < gpu(8).step_bytes(LLAMA_8B, 8192, GIB) < 4 * GIB


def test_a_context_that_is_asked_for_must_fit() -> None:
    assert gpu(8).fit(Q4, LLAMA_8B).fits
    assert not gpu(8, max_model_len=100_000).fit(Q4, LLAMA_8B).fits
    assert gpu(80, max_model_len=100_000).fit(Q4, LLAMA_8B).fits
    assert not gpu(80, max_model_len=200_000).fit(Q4, LLAMA_8B).fits, "the model's own context ends before"


def test_ranks_share_the_cache() -> None:
    one, two = gpu(12).fit(Q4, LLAMA_8B), gpu(12, tensor_parallel_size=2).fit(Q4, LLAMA_8B)
    assert two.context > 1.9 * one.context
    assert gpu(24, tensor_parallel_size=16).kv_bytes_per_token(LLAMA_8B) == LLAMA_8B.kv_bytes_per_token(2) // 8


@pytest.mark.parametrize("pool_tokens", [None, 4096])
@pytest.mark.parametrize("gib", [0.3, 1, 4])
def test_a_cpu_leaves_as_much_context_as_the_pool_gets(
    gib: float, pool_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(24, 1024, 4096, 16, 16, 64, 1000, 30_000)
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "num_layers": 24, "num_heads": 16, "num_kv_heads": 16}
    model = ModelConfig(
        architecture="LlamaForCausalLM", head_dim=64, intermediate_size=4096, rms_norm_eps=1e-5,
        max_position_embeddings=30_000, rope=RopeConfig(theta=1e4), **sizes,  # type: ignore[arg-type]
    )  # fmt: skip
    monkeypatch.setattr("minillm.loading.pool_size.free_bytes", lambda device: int(gib * GIB))
    config = EngineConfig(device="cpu", pool_tokens=pool_tokens)
    blocks, longest = size_pool(config, model, torch.device("cpu"), 4)
    assert replace(cpu(gib), config=config).fit(Weights(0, 0), shape).context == longest == min(blocks * 16, 30_000)
    if pool_tokens is not None:
        assert blocks * 16 <= pool_tokens
        longer = replace(config, max_model_len=8192)
        assert gib < 4 or size_pool(longer, model, torch.device("cpu"), 4) == (512, 8192)


def test_16_bits_stay_16_on_the_processors_that_have_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, packs in (("x86_64", True), ("aarch64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert cpu(8).layout() == Layout(4, packs, storage="expanded")
        assert gpu(8).layout("int8") == Layout(2, False, "int8")
    assert Budget(1, 1, False, 2, EngineConfig()).layout() == Layout(2, storage="expanded")
    assert Budget(1, 1, True, 2, EngineConfig(weights="expanded")).layout() == Layout(2, storage="expanded")


def test_the_engines_own_option_counts() -> None:
    config = EngineConfig(quantize="int4")
    assert Budget(1, 1, True, 2, config).layout() == Layout(2, False, "int4")
    assert Budget(1, 1, True, 2, config).layout("int8") == Layout(2, False, "int8")
    assert Budget(1, 1, True, 2, EngineConfig()).layout() == Layout(2)


def test_a_cpu_needs_room_while_it_loads() -> None:
    plain = Weights(4 * GIB, 4 * GIB)
    assert cpu(5).fit(plain, LLAMA_1B).fits
    assert not cpu(5).fit(replace(plain, loading=2 * GIB), LLAMA_1B).fits
    assert gpu(8).fit(plain, LLAMA_1B).fits


def test_tokens_per_second_go_by_the_bytes_of_a_token() -> None:
    fit = cpu(12).fit(Q4, LLAMA_8B)
    kv = 2048 * LLAMA_8B.kv_bytes_per_token(4)
    assert cpu(12).tokens_per_second(fit, LLAMA_8B, 20e9) == pytest.approx(EFFICIENCY * 20e9 / (Q4.read + kv))
    fast, slow = (gpu(80).tokens_per_second(gpu(80).fit(each, LLAMA_8B), LLAMA_8B, 4.27e12) for each in (Q4, FULL))
    assert 200 < slow < 250, "250 were measured on an H200"
    assert 2 < fast / slow < 3.5
    small = Shape(30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True)
    tiny = weights_in_memory(expected_tensors(small, 269_060_552), Layout(2))
    assert 1500 < gpu(80).tokens_per_second(gpu(80).fit(tiny, small), small, 4.27e12) < 2300, "2,248 were measured"
    short = replace(fit, context=100)
    assert cpu(12).tokens_per_second(short, LLAMA_8B, 20e9) > cpu(12).tokens_per_second(fit, LLAMA_8B, 20e9)


def test_a_cpu_that_is_asked_for_8_bits_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    layout = cpu(8, weights="int8").layout()
    assert layout == Layout(4, True, storage="int8")
    assert gpu(8, weights="int8").layout().storage == "expanded"
    matrix, table = StoredTensor("a.weight", (96, 960), "Q4_1"), StoredTensor("token_embd.weight", (512, 960), "Q8_0")
    in_8, in_4, stored, padded = 13 / 12, 5 / 8, 8.5 / 8, (1280 + 32) / 960  # 960 + 80 + 2 columns, filled up to 256s
    tied = weights_in_memory([matrix, table], layout)
    assert tied.memory == round(96 * 960 * (padded + in_4) + 512 * 960 * (stored + padded))
    assert tied.read == round(96 * 960 * in_4 + 512 * 960 * in_8), "a token reads 4 bits where there are 4"
    assert tied.loading == 2 * 512 * 1040 + 4 * 64 * 512, "levels of the largest twice, and the first product"
    head = StoredTensor("output.weight", (512, 960), "BF16")
    assert weights_in_memory([matrix, table, head], layout).memory == tied.memory
    assert weights_in_memory([StoredTensor(table.name, table.shape, "BF16")], layout).memory == round(
        512 * 960 * (stored + padded)
    ), "a table of numbers gets 8 bits"


def test_a_cpu_that_is_asked_for_few_bits_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    layout = cpu(8, weights="stored").layout()
    assert layout == Layout(4, True, storage="int4")
    in_4, in_6 = StoredTensor("a.weight", (96, 960), "Q4_K"), StoredTensor("b.weight", (96, 960), "Q6_K")
    plain, table = StoredTensor("c.weight", (96, 960), "BF16"), StoredTensor("token_embd.weight", (512, 960), "Q8_0")
    found = weights_in_memory([in_4, in_6, plain, table], layout)
    assert found.read == round(96 * 960 * (5 / 8 + 13 / 12 + 2) + 512 * 960 * 13 / 12)
    padded = (1280 + 32) / 960
    in_float16 = 96 * 1024 * 2
    assert found.memory == round(96 * 960 * (5 / 8 + padded) + in_float16 + 512 * 960 * (padded + 8.5 / 8))
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert cpu(8, weights="stored").layout().storage == "expanded"
