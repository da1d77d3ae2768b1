"""Every kernel once, over small odd shapes, under NVIDIA's compute-sanitizer.

    export PYTHONPATH=.:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --error-exitcode 9 python tests/kernels/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/kernels/sanitize.py

Without torch's caching allocator every tensor is an allocation of its own, so that a read beyond its end is noticed.
"""

from __future__ import annotations

import torch

from lib.kernels import DEVICE, make_pool, randn, rounded, shape_of
from minillm.kernels import DecodeInputs, Field, LayerCache, RotaryInputs, SamplingInputs, SearchField
from minillm.kernels.arguments import HeadNorms
from minillm.kernels.attention import invariant as invariant_attention
from minillm.kernels.attention.decode import paged_attention
from minillm.kernels.attention.plan import FREE, WorkList, plan_attention
from minillm.kernels.attention.prefill import prefill_attention
from minillm.kernels.attention.shared import prefix_attention
from minillm.kernels.cache import blocks, rotary
from minillm.kernels.decode_state import beams as beam_rows
from minillm.kernels.decode_state import decode as decode_rows
from minillm.kernels.linear import invariant as invariant_linear
from minillm.kernels.linear import matvec
from minillm.kernels.linear.low_bit import choose as few_bits
from minillm.kernels.linear.low_bit.layouts import FP8, Layout, random_matrix
from minillm.kernels.norm import activation
from minillm.kernels.norm import rms_norm as norm
from minillm.kernels.sampling import draw as sampling
from minillm.kernels.sampling import masks, top_k


def check_attention(dtype: torch.dtype) -> None:
    for heads, kv_heads, dim, block_size in ((9, 3, 64, 16), (6, 1, 80, 1), (4, 4, 128, 4), (8, 1, 128, 1)):
        pool = make_pool([1, 37, 0, 130], kv_heads, dim, dtype, block_size)
        q = randn(4, heads, dim, dtype=dtype)
        levels = rounded(pool)
        for splits, window in ((1, None), (3, None), (1, 33), (3, 33)):
            for each in (pool, levels):
                paged_attention(q, each._replace(window=window), 0.1, num_splits=splits)
                invariant_attention.paged_attention(q, each._replace(window=window), 0.1, num_splits=splits)
        chosen = torch.tensor([3, 3, 1, 2], device=DEVICE)  # two of them share all of their full blocks
        tables, lens = pool.tables[chosen], pool.lens[chosen]
        for processors in (1, 132):
            for each in (pool, levels):
                shape = shape_of(heads, kv_heads, dim, dtype, processors, each is levels)
                plan = plan_attention(tables.tolist(), lens.tolist(), block_size, shape, 4, FREE)
                assert plan is not None
                work = WorkList.allocate(4, shape, DEVICE).fill(plan)
                prefix_attention(q, each._replace(tables=tables, lens=lens), 0.1, work)
        starts = torch.tensor([0, 1, 20, 20, 90], dtype=torch.int32, device=DEVICE)
        chunk = randn(90, heads, dim, dtype=dtype)
        for window in (None, 1, 33):
            for each in (pool, levels):
                prefill_attention(chunk, each._replace(window=window), starts, 0.1)
                invariant_attention.prefill_attention(chunk, each._replace(window=window), starts, 0.1)
            for capacity in (38, 168):  # of contexts of 168 tokens: some are unpacked, or all
                prefill_attention(chunk, levels._replace(window=window), starts, 0.1, capacity=capacity)
        k, v = randn(4, kv_heads, dim, dtype=dtype), randn(4, kv_heads, dim, dtype=dtype)
        angles = randn(4, dim // 2)
        slots = torch.tensor([0, -1, 5, 3], device=DEVICE)
        rope = RotaryInputs(angles.cos(), angles.sin(), slots)
        norms = HeadNorms(randn(dim, dtype=dtype), randn(dim, dtype=dtype), 1e-5)
        for layer in (LayerCache(pool.k, pool.v), LayerCache(levels.k, levels.v, levels.k_scales, levels.v_scales)):
            rotary.rotary_write_kv(q, k, v, rope, layer)
            rotary.rotary_write_kv(q, k, v, rope, layer, norms)


def check_products(dtype: torch.dtype) -> None:
    x, weight = randn(3, 577, dtype=dtype), randn(577, dtype=dtype)
    norm.rms_norm(x, weight, 1e-5)
    activation.silu_mul(randn(3, 2 * 333, dtype=dtype))
    for tokens in (1, 3):
        few, residual = x[:tokens].contiguous(), randn(tokens, 90, dtype=dtype)
        matvec.product(few, randn(91, 577, dtype=dtype), randn(91, dtype=dtype), None, (weight, 1e-5))
        matvec.product(few, randn(2 * 91, 577, dtype=dtype), None, None, (weight, 1e-5), gated=True)
        matvec.product(few, randn(90, 577, dtype=dtype))
        matvec.product(few, randn(90, 577, dtype=dtype), None, residual, add=True)
    for tokens in (1, 20, 150, 300):
        x, weight = randn(tokens, 520, dtype=dtype), randn(2 * 88, 520, dtype=dtype)
        invariant_linear.product(x, weight, randn(176, dtype=dtype), randn(tokens, 176, dtype=dtype), add=True)
        invariant_linear.product(x, weight, None, randn(tokens, 88, dtype=dtype), gated=True)


def check_blocks(dtype: torch.dtype) -> None:
    cache = randn(2, 2, 5, 4, 3, 64, dtype=dtype)
    blocks.block_copy(cache, torch.tensor([[0, 4], [1, 2]], device=DEVICE))
    ids, staging = torch.tensor([3, 1], device=DEVICE), torch.zeros(2, 2, 2, 4, 3, 64, dtype=dtype, device=DEVICE)
    blocks.gather_blocks(cache, ids, staging)
    blocks.scatter_blocks(cache, ids, staging)


def check_low_bit() -> None:
    layouts = (
        Layout(4, "plain", 8),
        Layout(4, "super"),
        Layout(5, "super"),
        Layout(6, "bytes", 32, 16),
        Layout(8, "plain"),
    )
    for layout in (*layouts, FP8):
        generator = torch.Generator(DEVICE).manual_seed(0)
        matrix = random_matrix(layout, (2 * 77, 512), 0.02, generator)
        x, weight = randn(300, 512, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16)
        for tokens in (1, 2, 3, 20, 300):
            few = x[:tokens]
            few_bits.product(few, (matrix,), randn(154, dtype=torch.bfloat16), None, (weight, 1e-5), gated=True)
            few_bits.product(few, (matrix, matrix), None, randn(tokens, 308, dtype=torch.bfloat16), add=True)
        few_bits.embedding(torch.tensor([3, 153, 0], device=DEVICE), matrix, torch.bfloat16)


def check_rows() -> None:
    for vocab in (50, 5001):
        logits = torch.cat((randn(5, vocab), torch.zeros(1, vocab, device=DEVICE)))
        rows = len(logits)
        numbers = torch.arange(rows, device=DEVICE)
        settings = SamplingInputs(
            torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0], device=DEVICE),
            torch.tensor([0, 0, 40, 0, 3000, 20], device=DEVICE),
            torch.tensor([1.0, 1.0, 0.9, 0.5, 0.9, 1.0], device=DEVICE),
            torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0], device=DEVICE),
            numbers,
            numbers,
        )
        sampling.sample(logits, settings)
        sampling.log_probabilities(logits, numbers)
        top_k.top_log_probabilities(logits, 20)
        words = torch.zeros(rows, Field.TABLE + 7, dtype=torch.int32, device=DEVICE)
        words[:, Field.POSITION] = torch.arange(rows, device=DEVICE)
        words[:, Field.FREQUENCY_PENALTY] = 1  # the least float32 above 0: a penalty all the same
        counts = torch.zeros(rows, vocab, dtype=torch.int32, device=DEVICE)
        chosen = torch.tensor([2, -1, 0, rows - 1], dtype=torch.int32, device=DEVICE)
        inputs = DecodeInputs.allocate(len(chosen), 7, DEVICE)
        decode_rows.begin_decode(words, chosen, 4, inputs)
        decode_rows.penalize(logits[:4], words, counts, chosen, torch.empty(4, vocab, device=DEVICE))
        bits = torch.zeros(2, vocab // 32 + 1, dtype=torch.int32, device=DEVICE)
        masks.mask_logits(logits[:4], torch.tensor([1, -1, 0, 1], dtype=torch.int32, device=DEVICE), bits, logits[:4])
        decode_rows.end_decode(words, counts, chosen, torch.tensor([0, 1, 2, vocab - 1], device=DEVICE))
        beams = torch.tensor([rows - 1, 2, 0, -1], dtype=torch.int32, device=DEVICE)
        words[:, Field.POSITION], words[:, Field.RANK] = 27, torch.arange(rows, device=DEVICE)
        searches = torch.zeros(2, SearchField.WORDS, dtype=torch.int32, device=DEVICE)
        searches[0, :3] = torch.tensor([0, 3, 6], device=DEVICE)
        values, ids = top_k.top_log_probabilities(logits[:4], 8)
        parents, *_ = beam_rows.choose_beams(words, beams, searches, values, ids, vocab, 3)
        beam_rows.fork_rows(words, beams, torch.where(beams >= 0, parents, 0), 4)
        beam_rows.fork_rows(words, beams, torch.zeros_like(parents), 4)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check_attention(dtype)
        check_products(dtype)
        check_blocks(dtype)
    check_low_bit()
    check_rows()
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
