"""Attention of many queries over shared tokens in 8 bits: numbers become float16 in the registers that `wgmma` reads.

Everything is transposed: scores are K times queries, outputs V times weights. So K and V are the matrix unit's first
operand, which it takes from registers: they go from memory to registers as they lie there, a tile ahead, and never
through shared memory. Queries lie in shared memory while an item lasts, and each tile's weights of the softmax pass
through it. Whole numbers are exact in float16; queries are, times a power of two, but for what is 2^-24 of the largest.

A running maximum costs all warps a barrier and each lane a walk through its outputs, so it is only corrected where a
weight would pass 2^`_ROOM`. It is of scores with the logarithm of V's scale added: a weight times its scale is never
more, however large V is, so it holds in float16.

Lane 4r + t of warp w has, of 64 tokens,

- of K, tokens 16w + r and 16w + r + 8, dimensions 16t to 16t + 15 of each 64: the queries' are put in that order;
- of V, tokens 2t and 2t + 1 of each 8, four (of 64: two) neighbouring dimensions;
- scores, weights and scales of its tokens of K; of the output, its dimensions of V.
"""

# ruff: noqa: RUF005 (Triton adds tuples and unpacks none)
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages
from minillm.kernels.compat import dot, finished
from minillm.kernels.lane_products import alternating, halves, power
from minillm.kernels.low_bit_dot import joined
from minillm.kernels.low_bit_lanes import fours

TOKENS = tl.constexpr(64)  # of a tile
WARPS = tl.constexpr(4)
_ROOM = tl.constexpr(4.0)
_LEAST = tl.constexpr(1e-30)  # of V's scales: those of zeros have a logarithm too


@triton.jit
def _unpacked(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pairs of float16 ``[ROWS, COLUMNS / 2]`` as numbers ``[ROWS, COLUMNS]``."""
    words = tl.reshape(words, [ROWS, COLUMNS // 2])
    first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), [ROWS, COLUMNS])


@triton.jit
def _k_tile(loaded, HEAD_DIM: tl.constexpr):
    """A tile of K, ``[TOKENS, HEAD_DIM]`` float16; the order of the dimensions is `_in_order_of_k`'s."""
    pairs = ()
    for chunk in tl.static_range(HEAD_DIM // 64):
        words = fours(loaded[chunk], TOKENS * 4)
        for i in tl.static_range(4):
            pairs = pairs + halves(words[i])
    words = tl.reshape(joined(pairs, HEAD_DIM // 8), [2, WARPS, 8, 4, HEAD_DIM // 8])
    return _unpacked(tl.permute(words, (1, 0, 2, 4, 3)), TOKENS, HEAD_DIM)


@triton.jit
def _in_order_of_k(q, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Queries ``[ROWS, HEAD_DIM]``, transposed, with their dimensions in the order of `_k_tile`'s."""
    q = tl.reshape(q, [ROWS, HEAD_DIM // 64, 4, 8, 2])
    return tl.reshape(tl.permute(q, (1, 3, 2, 4, 0)), [HEAD_DIM, ROWS])


@triton.jit
def _v_tile(loaded, HEAD_DIM: tl.constexpr):
    """A tile of V, transposed, ``[HEAD_DIM, TOKENS]`` float16; the order of the dimensions is `_in_order`'s."""
    PARTS: tl.constexpr = HEAD_DIM // 32  # dimensions of a lane
    made, pairs = (), ()
    for i in tl.static_range(TOKENS // 8):
        low, high = alternating(loaded[2 * i], loaded[2 * i + 1])
        made = made + (halves(low) + halves(high),)
    for part in tl.static_range(PARTS):
        for i in tl.static_range(TOKENS // 8):
            pairs = pairs + (made[i][part],)
    words = tl.reshape(joined(pairs, PARTS * TOKENS // 8), [WARPS, 8, 4, PARTS // 2, 2, TOKENS // 8])
    return _unpacked(tl.permute(words, (3, 0, 4, 1, 5, 2)), HEAD_DIM, TOKENS)


@triton.jit
def _in_order(out, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Outputs ``[dimensions of _v_tile, ROWS]`` as ``[ROWS, HEAD_DIM]``."""
    out = tl.reshape(out, [HEAD_DIM // 64, WARPS, 2, 8, ROWS])
    return tl.reshape(tl.permute(out, (4, 1, 3, 0, 2)), [ROWS, HEAD_DIM])


@triton.jit
def _k_ids(table_ptr, tokens, end, BLOCK_SIZE: tl.constexpr):
    return tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def _load_k(k_ptr, ids, tokens, end, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr):
    """A lane's words of K; ``k_ptr`` is the lane's first, in words. Behind the end they are anything."""
    at = k_ptr + ids.to(tl.int64) * (BLOCK_SIZE * SLOT // 4) + tokens % BLOCK_SIZE * (SLOT // 4)
    mask = (tokens < end)[:, None]
    words = ()
    for chunk in tl.static_range(HEAD_DIM // 64):
        words = words + (tl.load((at + chunk * 16)[:, None] + tl.arange(0, 4)[None, :], mask=mask),)
    return words


@triton.jit
def _v_ids(table_ptr, tokens, end, BLOCK_SIZE: tl.constexpr):
    """The ids of a lane's tokens of V, of which ``tokens`` is the first: one for each block or each two tokens."""
    ids = ()
    for i in tl.static_range(0, TOKENS, max(8, min(16, BLOCK_SIZE))):
        for n in tl.static_range(2 if BLOCK_SIZE == 1 else 1):
            at = tokens + i + n
            ids = ids + (tl.load(table_ptr + at // BLOCK_SIZE, mask=at < end, other=0),)
    return ids


@triton.jit
def _load_v(v_ptr, ids, tokens, end, BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """A lane's numbers of V, a word, or two dimensions, for each token; STRIDE is a token's. As `_load_k`."""
    numbers = ()
    for i in tl.static_range(TOKENS // 8):
        for n in tl.static_range(2):
            token = tokens + 8 * i + n
            if BLOCK_SIZE == 1:
                block = ids[2 * i + n]
            else:
                block = ids[i // max(1, min(16, BLOCK_SIZE) // 8)]
            # The place within a block is the lane's and a constant: both lie in an address that all tokens share.
            if BLOCK_SIZE >= 16:
                place = (tokens + i // 2 * 16) % BLOCK_SIZE + (i % 2 * 8 + n)
            elif BLOCK_SIZE == 1:
                place = 0
            else:
                place = tokens % BLOCK_SIZE + n
            at = v_ptr + block.to(tl.int64) * (BLOCK_SIZE * STRIDE) + place * STRIDE
            numbers = numbers + (tl.load(at, mask=token < end).to(tl.int32),)
    return numbers


@triton.jit
def _load_scales(
    scales_ptr, ids, tokens, end, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr
):  # fmt: skip
    return tl.load(
        scales_ptr + ids.to(tl.int64) * (KV_HEADS * BLOCK_SIZE) + tokens % BLOCK_SIZE, mask=tokens < end, other=0.0
    )


@triton.jit
def _by_rows(x):
    """What lanes have of each token of K, as ``[TOKENS, 1, 4, 1]``; scores are ``[TOKENS, ROWS / 8, 4, 2]``."""
    x = tl.permute(tl.reshape(x, [2, WARPS, 8, 4]), (1, 0, 2, 3))
    return tl.reshape(x, [TOKENS, 1, 4, 1])


@triton.jit
def _over_pairs(x, ROWS: tl.constexpr, SUM: tl.constexpr):
    """The larger, or the sum, of a lane's two tokens; ``[TOKENS / 2, ROWS / 8, 4, 2]``."""
    x = tl.reshape(x, [WARPS, 2, 8, ROWS // 8, 4, 2])
    x = tl.sum(x, 1) if SUM else tl.max(x, 1)
    return tl.reshape(x, [TOKENS // 2, ROWS // 8, 4, 2])


@triton.jit
def attend_rows(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, begin, end, scale_log2e,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Attention of ``q [ROWS, HEAD_DIM]`` over tokens ``begin … end - 1``, at least one, from a block's first on.

    Returns:
        Outputs ``[ROWS, HEAD_DIM]`` and log-sum-exps, base 2, ``[ROWS]``, in float32.
    """
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
    PARTS: tl.constexpr = HEAD_DIM // 32
    lanes = tl.arange(0, TOKENS * 4)
    k_at = lanes // 32 % WARPS * 16 + lanes // (32 * WARPS) * 8 + lanes // 4 % 8
    k_ptr = (k_ptr + kv_head * HEAD_DIM).to(tl.pointer_type(tl.int32), bitcast=True) + lanes % 4 * 4
    lanes = tl.arange(0, WARPS * 32)
    v_at = lanes % 4 * 2
    v_ptr += kv_head * HEAD_DIM
    if HEAD_DIM == 128:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + lanes // 4
    else:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + lanes // 4
    k_scales_ptr += kv_head * BLOCK_SIZE
    v_scales_ptr += kv_head * BLOCK_SIZE
    k_ids = _k_ids(table_ptr, begin + k_at, end, BLOCK_SIZE)
    v_ids = _v_ids(table_ptr, begin + v_at, end, BLOCK_SIZE)
    k = _load_k(k_ptr, k_ids, begin + k_at, end, HEAD_DIM, BLOCK_SIZE, SLOT)
    k_scales = _load_scales(k_scales_ptr, k_ids, begin + k_at, end, BLOCK_SIZE, KV_HEADS)
    v_scales = _load_scales(v_scales_ptr, k_ids, begin + k_at, end, BLOCK_SIZE, KV_HEADS)
    v = _load_v(v_ptr, v_ids, begin + v_at, end, BLOCK_SIZE, SLOT // PARTS)
    k_ids = _k_ids(table_ptr, begin + TOKENS + k_at, end, BLOCK_SIZE)
    v_ids = _v_ids(table_ptr, begin + TOKENS + v_at, end, BLOCK_SIZE)

    q = q.to(tl.float32)
    size = tl.abs(q)
    bits = tl.max(tl.where(size < float("inf"), size, 0.0)).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 20), 240)
    growth = ((267 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest becomes 2^13 to 2^14
    factor = scale_log2e * ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    q = (_in_order_of_k(q, ROWS, HEAD_DIM) * growth).to(tl.float16)

    anchor = tl.full([1, ROWS // 8, 4, 2], -1e30, tl.float32)
    totals = tl.zeros([TOKENS // 2, ROWS // 8, 4, 2], tl.float32)
    out = tl.zeros([HEAD_DIM, ROWS], tl.float32)
    for position in range(begin, end, TOKENS):
        tokens = position + k_at
        products = finished(dot(_k_tile(k, HEAD_DIM), q, tl.zeros([TOKENS, ROWS], tl.float32)))
        valid = tokens < end
        scale = k_scales * factor
        bias = tl.log2(tl.maximum(v_scales, _LEAST, propagate_nan=tl.PropagateNan.ALL))
        inverse = power(-bias)
        bias = tl.where(valid, bias, float("-inf"))
        k = _load_k(k_ptr, k_ids, tokens + TOKENS, end, HEAD_DIM, BLOCK_SIZE, SLOT)
        k_scales = _load_scales(k_scales_ptr, k_ids, tokens + TOKENS, end, BLOCK_SIZE, KV_HEADS)
        v_scales = _load_scales(v_scales_ptr, k_ids, tokens + TOKENS, end, BLOCK_SIZE, KV_HEADS)
        k_ids = _k_ids(table_ptr, tokens + 2 * TOKENS, end, BLOCK_SIZE)
        scores = tl.reshape(products, [TOKENS, ROWS // 8, 4, 2]) * _by_rows(scale) + _by_rows(bias)
        # Whole numbers have an instruction for the largest of a warp.
        excess = tl.max(tl.max(_over_pairs(scores, ROWS, False) - anchor, 3), 1)
        if tl.max((excess > _ROOM).to(tl.int32)) > 0:
            higher = tl.maximum(anchor, tl.max(scores, 0, keep_dims=True))
            correction = power(anchor - higher)
            totals *= correction
            out = tl.reshape(tl.reshape(out, [HEAD_DIM, ROWS // 8, 4, 2]) * correction, [HEAD_DIM, ROWS])
            anchor = higher
        weights = power(scores - anchor)  # times V's scales
        totals += _over_pairs(weights * _by_rows(inverse), ROWS, True)
        weights = tl.reshape(weights, [TOKENS, ROWS]).to(tl.float16)
        out = finished(dot(_v_tile(v, HEAD_DIM), weights, out))
        v = _load_v(v_ptr, v_ids, position + TOKENS + v_at, end, BLOCK_SIZE, SLOT // PARTS)
        v_ids = _v_ids(table_ptr, position + 2 * TOKENS + v_at, end, BLOCK_SIZE)
    total = tl.sum(totals, 0, keep_dims=True)
    out = tl.reshape(tl.reshape(out, [HEAD_DIM, ROWS // 8, 4, 2]) / total, [HEAD_DIM, ROWS])
    return _in_order(out, ROWS, HEAD_DIM), tl.reshape(anchor + tl.log2(total), [ROWS])


def takes(q: Tensor, pages: Pages) -> bool:
    """Whether shared tokens can be read this way: in 8 bits, for queries of 16 bits."""
    return pages.k_scales is not None and q.element_size() == 2 and q.shape[2] in (64, 128)
