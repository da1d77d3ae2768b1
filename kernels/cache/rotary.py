"""Rotary embedding fused with the write of K and V into their blocks.

    x = x / sqrt(mean(x^2) + eps) * weight, per head of q and k     (if the model has such norms, here or at the end)
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)                  (Su et al. 2021, half-split layout)

q is rotated in place; rotated k, and v, are written to their slots, quantized in a cache of 8 bits. Bytes: reads (heads
+ 2 kv_heads) * head_dim elements a token and writes as many (k and v in 8 bits: one byte each). Memory-bound, and
launch-bound at decode batch sizes: one launch replaces five ops. Grid: (tokens, groups of q heads + 1); the last
program of a token handles K and V. Tile: heads x head_dim / 2, both halves, so neither a head's norm nor a row's
maximum needs a second read. Slot offsets are 64-bit; slot -1 (padding) writes nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import HeadNorms, LayerCache, RotaryInputs, cdiv, check_scales, next_power_of_2
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched

_Q_HEADS_PER_PROGRAM = 16


@triton.jit
def _norm(first, second, weight_ptr, pairs, is_pair, HALF: tl.constexpr, EPS: tl.constexpr):
    """Normalize heads by RMSNorm, with the rounding of `reference.rms_norm`.

    ``first`` and ``second`` are the halves of each head, ``[heads, HALF]``; the results have the same shapes.
    """
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]
    weight_first = tl.load(weight_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    weight_second = tl.load(weight_ptr + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    normed_first = (wide_first * scale).to(first.dtype).to(tl.float32) * weight_first
    normed_second = (wide_second * scale).to(first.dtype).to(tl.float32) * weight_second
    return normed_first.to(first.dtype), normed_second.to(first.dtype)


@triton.jit
def _rotate(first, second, cos, sin):
    first, second = first.to(tl.float32), second.to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotate_and_norm(
    first, second, cos, sin, weight_ptr, pairs, is_pair, HALF: tl.constexpr, EPS: tl.constexpr, AFTER: tl.constexpr
):
    """Rotate heads. If ``EPS`` is given, also normalize them (`_norm`): after rotation if ``AFTER``, else before."""
    if EPS is not None and not AFTER:
        first, second = _norm(first, second, weight_ptr, pairs, is_pair, HALF, EPS)
    turned_first, turned_second = _rotate(first, second, cos, sin)
    turned_first, turned_second = turned_first.to(first.dtype), turned_second.to(first.dtype)
    if EPS is not None and AFTER:
        turned_first, turned_second = _norm(turned_first, turned_second, weight_ptr, pairs, is_pair, HALF, EPS)
    return turned_first, turned_second


@triton.jit
def _largest(x):
    """Return each row's largest magnitude, as the bits of a float32.

    Compared as integers, finite numbers sort before infinity, and infinity before NaN.
    """
    return tl.max(tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True), axis=1)


@triton.jit
def _scales(largest):
    """Return the scales of `reference.quantize_rows`, from the result of `_largest`."""
    return tl.where(largest < 0x7F800000, largest.to(tl.float32, bitcast=True) * (1 / 127), float("nan"))


@triton.jit
def _levels(x, scales):
    """Divide ``x`` by its row's scale and round to the nearest int8. NaN becomes 0.

    Adding and subtracting 1.5 * 2^23 drops the fraction.
    """
    steps = tl.div_rn(x.to(tl.float32), tl.where(scales > 0, scales, 1.0)[:, None]) + 12582912.0 - 12582912.0
    return tl.where((scales == scales)[:, None], steps, 0.0).to(tl.int8)


@triton.jit
def _write_levels(
    out, scales_out, first, second, pairs, in_ptr, mask, is_head, rest, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    REST_TILE: tl.constexpr,
):  # fmt: skip
    """Quantize heads to 8 bits, and store their values at ``out`` and their scales at ``scales_out``.

    ``first`` and ``second`` are the two rotated halves. Dimensions that are not rotated are read from ``in_ptr``.
    """
    largest = tl.maximum(_largest(first), _largest(second))
    if REST_TILE:
        rest_mask = is_head[:, None] & (rest < HEAD_DIM)[None, :]
        others = tl.load(in_ptr + rest[None, :], mask=rest_mask, other=0.0)
        largest = tl.maximum(largest, _largest(others))
    scales = _scales(largest)
    tl.store(scales_out, scales, mask=is_head)
    tl.store(out + pairs[None, :], _levels(first, scales), mask=mask)
    tl.store(out + HALF + pairs[None, :], _levels(second, scales), mask=mask)
    if REST_TILE:
        tl.store(out + rest[None, :], _levels(others, scales), mask=rest_mask)


@launched
@triton.jit
def _rotary_write_kv_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slot_ptr,
    q_norm_ptr, k_norm_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, slot_stride,
    num_heads, num_kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, EPS: tl.constexpr, AFTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    pairs = tl.arange(0, HALF_TILE)
    is_pair = pairs < HALF
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0)[None, :]
    if group < tl.num_programs(1) - 1:
        heads = group * Q_HEADS + tl.arange(0, Q_HEADS)
        mask = (heads < num_heads)[:, None] & is_pair[None, :]
        first_ptr = q_ptr + token * q_token_stride + heads[:, None] * q_head_stride + pairs[None, :]
        first = tl.load(first_ptr, mask=mask, other=0.0)
        second = tl.load(first_ptr + HALF, mask=mask, other=0.0)
        first, second = _rotate_and_norm(first, second, cos, sin, q_norm_ptr, pairs, is_pair, HALF, EPS, AFTER)
        tl.store(first_ptr, first, mask=mask)
        tl.store(first_ptr + HALF, second, mask=mask)
    else:
        slot = tl.load(slot_ptr + token)
        if slot >= 0:
            heads = tl.arange(0, KV_HEADS)
            is_head = heads < num_kv_heads
            mask = is_head[:, None] & is_pair[None, :]
            k_in = k_ptr + token * k_token_stride + heads[:, None] * k_head_stride
            v_in = v_ptr + token * v_token_stride + heads[:, None] * v_head_stride
            k_out = k_cache_ptr + slot * slot_stride + heads[:, None] * HEAD_DIM
            v_out = v_cache_ptr + slot * slot_stride + heads[:, None] * HEAD_DIM
            first = tl.load(k_in + pairs[None, :], mask=mask, other=0.0)
            second = tl.load(k_in + HALF + pairs[None, :], mask=mask, other=0.0)
            first, second = _rotate_and_norm(first, second, cos, sin, k_norm_ptr, pairs, is_pair, HALF, EPS, AFTER)
            if k_scales_ptr is None:
                tl.store(k_out + pairs[None, :], first, mask=mask)
                tl.store(k_out + HALF + pairs[None, :], second, mask=mask)
                tl.store(v_out + pairs[None, :], tl.load(v_in + pairs[None, :], mask=mask), mask=mask)
                tl.store(v_out + HALF + pairs[None, :], tl.load(v_in + HALF + pairs[None, :], mask=mask), mask=mask)
                if REST_TILE:  # dimensions that are not rotated
                    rest = 2 * HALF + tl.arange(0, REST_TILE)
                    mask = is_head[:, None] & (rest < HEAD_DIM)[None, :]
                    tl.store(k_out + rest[None, :], tl.load(k_in + rest[None, :], mask=mask), mask=mask)
                    tl.store(v_out + rest[None, :], tl.load(v_in + rest[None, :], mask=mask), mask=mask)
            else:
                rest = 2 * HALF + tl.arange(0, REST_TILE if REST_TILE else 1)
                at = (slot // BLOCK_SIZE * num_kv_heads + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
                _write_levels(
                    k_out, k_scales_ptr + at, first, second, pairs, k_in, mask, is_head, rest, HALF, HEAD_DIM,
                    REST_TILE,
                )  # fmt: skip
                first = tl.load(v_in + pairs[None, :], mask=mask, other=0.0)
                second = tl.load(v_in + HALF + pairs[None, :], mask=mask, other=0.0)
                _write_levels(
                    v_out, v_scales_ptr + at, first, second, pairs, v_in, mask, is_head, rest, HALF, HEAD_DIM,
                    REST_TILE,
                )  # fmt: skip


def rotary_write_kv(
    q: Tensor, k: Tensor, v: Tensor, rope: RotaryInputs, cache: LayerCache, norms: HeadNorms | None = None
) -> None:
    """Rotate q and k, and write k and v to their slots: see `reference.rotary_write_kv`.

    Tokens and heads may have any strides. Raises ValueError for a wrong shape or layout.
    """
    cos, sin, slots = rope
    k_cache, v_cache, k_scales, v_scales = cache
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[1]
    if k.shape != v.shape or k.shape != (tokens, num_kv_heads, head_dim):
        raise ValueError(f"k and v must be [{tokens}, kv_heads, {head_dim}], not {tuple(k.shape)}, {tuple(v.shape)}")
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of q, k and v must be contiguous")
    if cos.shape != (tokens, half) or sin.shape != cos.shape or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"cos and sin must be contiguous [{tokens}, rotary_dim / 2], not {tuple(cos.shape)}")
    if k_cache.shape[2:] != (num_kv_heads, head_dim) or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"caches must be contiguous [blocks, block_size, {num_kv_heads}, {head_dim}]")
    check_scales(k_cache, k_scales)
    check_scales(v_cache, v_scales)
    if 2 * half > head_dim:
        raise ValueError(f"rotary dimension {2 * half} is larger than head_dim {head_dim}")
    q_norm, k_norm, eps, after = (None, None, None, False) if norms is None else norms
    if norms is not None and (2 * half != head_dim or norms.q.shape != (head_dim,) or norms.k.shape != (head_dim,)):
        raise ValueError(f"norms of q and k must be [{head_dim}], and all of a head must be rotated")
    if not tokens:
        return
    q_heads = min(_Q_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    rest = head_dim - 2 * half
    _rotary_write_kv_kernel[(tokens, cdiv(num_heads, q_heads) + 1)](
        q, k_cache, v_cache, k_scales, v_scales, k, v, cos, sin, slots, q_norm, k_norm,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), num_kv_heads * head_dim,
        num_heads, num_kv_heads,
        BLOCK_SIZE=k_cache.shape[1], HEAD_DIM=head_dim, HALF=half, HALF_TILE=next_power_of_2(half),
        REST_TILE=next_power_of_2(rest) if rest else 0,
        Q_HEADS=q_heads, KV_HEADS=next_power_of_2(num_kv_heads), EPS=eps, AFTER=after, num_warps=4,
        **pdl_options(q.device),
    )  # fmt: skip
