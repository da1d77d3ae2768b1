"""Properties that all ops share."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, ON_GPU, make_pool, parameters, randn, relative_error
from minillm import kernels
from minillm.kernels import LayerCache, Pages, RotaryInputs, cpu, reference

pytest.importorskip("triton")
from minillm.kernels import gpu
from minillm.kernels.attention.decode import paged_attention
from minillm.kernels.attention.prefill import prefill_attention
from minillm.kernels.cache import blocks, rotary
from minillm.kernels.decode_state import reference as state_reference
from minillm.kernels.norm import rms_norm as norm
from minillm.kernels.sampling import draw as sampling
from minillm.kernels.sampling import top_k


def test_the_same_inputs_give_the_same_bits_ten_times() -> None:
    pool = make_pool([300, 64, 17], 2, 64, torch.float16, 16)
    q, chunk = randn(3, 8, 64, dtype=torch.float16), randn(40, 8, 64, dtype=torch.float16)
    starts = torch.tensor([0, 20, 30, 40], dtype=torch.int32, device=DEVICE)
    logits = randn(3, 1000)
    settings = parameters(3, torch.Generator().manual_seed(0))
    x, weight = randn(5, 576, dtype=torch.float16), randn(576, dtype=torch.float16)

    def everything() -> list[Tensor]:
        return [
            paged_attention(q, pool, 0.1, num_splits=5),
            prefill_attention(chunk, pool, starts, 0.1),
            norm.rms_norm(x, weight, 1e-5),
            *sampling.sample_with_logprobs(logits, settings),
            *top_k.top_log_probabilities(logits, 9),
        ]

    first = everything()
    for _ in range(10 if ON_GPU else 2):
        for got, expected in zip(everything(), first, strict=True):
            assert torch.equal(got, expected)


def _narrow(pages: Pages) -> Pages:
    """Return the pages with tables of seven blocks. Other widths give other tiles, which round differently."""
    return pages._replace(tables=pages.tables[:, :7].contiguous())


@pytest.mark.gpu
def test_a_pool_beyond_2_to_the_31_elements() -> None:
    """Blocks near the end of a pool of more than 2^31 elements: every kernel that indexes it, against a small pool."""
    block_size, kv_heads, dim, heads = 16, 8, 128, 32
    num_blocks = (1 << 31) // (block_size * kv_heads * dim) + 64
    big_k, big_v = (
        torch.empty(num_blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"
    )
    assert big_k.numel() > 1 << 31
    small = _narrow(make_pool([100], kv_heads, dim, torch.bfloat16, block_size))
    last = torch.arange(num_blocks - 7, num_blocks, dtype=torch.int32, device=DEVICE)[None]
    own = small.tables[0].long()
    big_k[last[0].long()], big_v[last[0].long()] = small.k[own], small.v[own]
    q = randn(1, heads, dim, dtype=torch.bfloat16)
    big = Pages(big_k, big_v, last, small.lens)
    assert torch.equal(paged_attention(q, big, 0.1), paged_attention(q, small, 0.1))
    chunk = randn(50, heads, dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 50], dtype=torch.int32, device=DEVICE)
    expected = prefill_attention(chunk, small, starts, 0.1)
    assert torch.equal(prefill_attention(chunk, big, starts, 0.1), expected)
    k, v = (randn(1, kv_heads, dim, dtype=torch.bfloat16) for _ in "kv")
    slot = torch.tensor([num_blocks * block_size - 1], device=DEVICE)
    straight = RotaryInputs(torch.ones(1, dim // 2, device=DEVICE), torch.zeros(1, dim // 2, device=DEVICE), slot)
    rotary.rotary_write_kv(q, k, v, straight, LayerCache(big_k, big_v))
    assert torch.equal(big_k[-1, -1], k[0])
    assert torch.equal(big_v[-1, -1], v[0])
    del big, big_k, big_v
    pool = torch.empty(2, 2, num_blocks // 4 + 1, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 1 << 31
    pool[:, :, 0] = randn(2, 2, block_size, kv_heads, dim, dtype=torch.bfloat16)
    end = pool.shape[2] - 1
    blocks.block_copy(pool, torch.tensor([[0, end]], device=DEVICE))
    assert torch.equal(pool[:, :, end], pool[:, :, 0])
    staging = torch.zeros(1, 2, 2, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    blocks.gather_blocks(pool, torch.tensor([end], device=DEVICE), staging)
    assert torch.equal(staging[0], pool[:, :, 0])
    blocks.scatter_blocks(pool, torch.tensor([end - 1], device=DEVICE), staging)
    assert torch.equal(pool[:, :, end - 1], pool[:, :, 0])


@pytest.mark.gpu
def test_a_pool_in_8_bits_beyond_2_to_the_31_elements() -> None:
    block_size, kv_heads, dim, heads = 16, 8, 128, 32
    num_blocks = (1 << 31) // (block_size * kv_heads * dim) + 64
    shape = (num_blocks, block_size, kv_heads, dim)
    k, v = (torch.empty(shape, dtype=torch.int8, device=DEVICE) for _ in "kv")
    k_scales, v_scales = (torch.empty(num_blocks, kv_heads, block_size, device=DEVICE) for _ in "kv")
    assert k.numel() > 1 << 31
    small = _narrow(make_pool([100], kv_heads, dim, torch.bfloat16, block_size, in_8_bits=True))
    last = torch.arange(num_blocks - 7, num_blocks, dtype=torch.int32, device=DEVICE)[None]
    big = Pages(k, v, last, small.lens, None, k_scales, v_scales)
    for name in ("k", "v", "k_scales", "v_scales"):
        getattr(big, name)[last[0].long()] = getattr(small, name)[small.tables[0].long()]
    q, chunk = randn(1, heads, dim, dtype=torch.bfloat16), randn(50, heads, dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 50], dtype=torch.int32, device=DEVICE)
    assert torch.equal(paged_attention(q, big, 0.1), paged_attention(q, small, 0.1))
    assert torch.equal(prefill_attention(chunk, big, starts, 0.1), prefill_attention(chunk, small, starts, 0.1))
    rows = [randn(1, kv_heads, dim, dtype=torch.bfloat16) for _ in "kv"]
    slot = torch.tensor([num_blocks * block_size - 1], device=DEVICE)
    straight = RotaryInputs(torch.ones(1, dim // 2, device=DEVICE), torch.zeros(1, dim // 2, device=DEVICE), slot)
    rotary.rotary_write_kv(q, rows[0], rows[1], straight, LayerCache(k, v, k_scales, v_scales))
    for row, levels, scales in ((rows[0], k, k_scales), (rows[1], v, v_scales)):
        expected, factors = reference.quantize_rows(row[0].cpu())
        assert torch.equal(levels[-1, -1].cpu(), expected)
        assert torch.equal(scales[-1, :, -1].cpu(), factors)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_are_their_parts(rows: int, bias: bool) -> None:
    """The ops that the model calls agree with the reference, on the path that each batch size chooses."""
    x, norm_weight, residual = (randn(*shape, dtype=torch.float32) for shape in ((rows, 48), (48,), (rows, 34)))
    weight, offset = randn(34, 48, dtype=torch.float32), randn(34, dtype=torch.float32) if bias else None
    linear = kernels.LinearWeight(weight, offset)
    wide = [None if t is None else t.double() for t in (x, norm_weight, weight, offset, residual)]
    exact = reference.norm_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    out = torch.empty(rows, 34, device=DEVICE)
    assert relative_error(kernels.norm_linear(x, norm_weight, 1e-5, linear), exact) < 1e-5
    assert relative_error(kernels.norm_linear(x, norm_weight, 1e-5, linear, out), exact) < 1e-5
    assert relative_error(out, exact) < 1e-5
    exact = reference.norm_gated_linear(wide[0], wide[1], 1e-5, wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(kernels.norm_gated_linear(x, norm_weight, 1e-5, linear), exact) < 1e-5
    exact = reference.linear_add(wide[0], wide[2], wide[3], wide[4])  # type: ignore[arg-type]
    assert kernels.linear_add(x, linear, residual) is residual
    assert relative_error(residual, exact) < 1e-5
    exact = torch.nn.functional.linear(wide[0], wide[2], wide[3])  # type: ignore[arg-type]
    assert relative_error(kernels.linear(x, linear), exact) < 1e-5


def names(module: ModuleType) -> set[str]:
    return {name for name, value in vars(module).items() if inspect.isfunction(value)}


CONTRACTS = {**vars(reference), **vars(state_reference)}


@pytest.mark.parametrize("name", sorted(names(gpu)))
def test_every_implementation_takes_what_its_contract_takes(name: str) -> None:
    contract = inspect.signature(CONTRACTS[name]).parameters
    for module in (cpu, gpu):
        taken = inspect.signature(getattr(module, name)).parameters
        assert list(taken)[: len(contract)] == list(contract), module
        assert [taken[each].annotation for each in contract] == [each.annotation for each in contract.values()], module
        assert all(each.default is None for each in list(taken.values())[len(contract) :]), "more must not be needed"
    assert list(inspect.signature(getattr(kernels, name)).parameters)[: len(contract)] == list(contract)
    assert getattr(kernels, name).__doc__


def test_each_device_has_every_op() -> None:
    assert names(gpu) <= names(cpu)
    assert names(gpu) <= names(kernels)
    assert names(gpu) <= CONTRACTS.keys()
