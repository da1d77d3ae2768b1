"""Attention of many queries over shared tokens of an 8-bit cache: int8 is widened to 16 bits in `wgmma` registers.

Everything is transposed: scores are K times queries, outputs are V times weights. K and V are thus the tensor cores'
first operand, which may be in registers. They go from memory to registers as they are stored, one tile ahead, and never
through shared memory. Queries are in shared memory while an item is computed, and each tile's softmax weights pass
through it. int8 is exact in both 16-bit types. K has the type of the queries, V is bfloat16. bfloat16 values are
multiplied by `BFLOAT_UNIT`, so that they can be computed from the bits of the int8 values.

Softmax weights are ``2^(score - anchor)``. A query's anchor is its highest score in the first tile. A running maximum
would cost all warps a barrier per tile. bfloat16 does not need a running maximum: the first tile's maximum may be up to
2^100 times too low or too high. If weights overflow nevertheless, the item is computed again with the highest score of
all its tokens as anchor. The logarithm of V's scale is added to scores, so weights are proportional to their
contribution, however large V is. (A token loses its weight if its scale is 2^126 times smaller than the scale of
another token in the item.)

Of every 64 tokens, lane 4r + t of warp w holds

- K of tokens 16w + r and 16w + r + 8, in dimensions 16t to 16t + 15 of each 64. The queries use the same order.
- V of tokens 2t and 2t + 1 of each 8, in four adjacent dimensions (two if a head has 64).
- Scores, weights and scales of the lane's tokens of K.
- The output in the lane's dimensions of V, which the lane stores itself.

Code that runs once per item is kept short, because rarely used instructions are fetched late: 1,500 of them after the
last tile took 4 us.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages
from minillm.kernels.compat import dot, finished, has_int8_mma, prefetch_l2
from minillm.kernels.lanes import (
    BFLOAT_UNIT,
    int8_pair_to_bf16x2,
    int8_to_bf16x4,
    int8_to_f16x4,
    logarithm,
    power,
    reciprocal,
)
from minillm.kernels.linear.low_bit.lanes import columns4
from minillm.kernels.linear.low_bit.many_tokens import joined, unpacked

TOKENS = tl.constexpr(64)  # per tile
WARPS = tl.constexpr(4)
_AHEAD = tl.constexpr(3)  # tiles between the one loaded into registers and the one prefetched into the L2
_LEAST = tl.constexpr(1e-30)  # minimum of V's scales, so that scales of zeros have a logarithm


@triton.jit
def _k_tile(loaded, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Convert a loaded tile of K to ``[TOKENS, HEAD_DIM]`` in 16 bits (DTYPE).

    The dimensions are permuted; `_in_order_of_k` permutes the queries in the same way. bfloat16 values are multiplied
    by `BFLOAT_UNIT`.
    """
    pairs = ()
    for chunk in tl.static_range(HEAD_DIM // 64):
        words = columns4(loaded[chunk], TOKENS * 4)
        for i in tl.static_range(4):
            pairs = pairs + (int8_to_bf16x4(words[i]) if DTYPE == tl.bfloat16 else int8_to_f16x4(words[i]))  # noqa: SIM300
    words = tl.reshape(joined(pairs, HEAD_DIM // 8), [2, WARPS, 8, 4, HEAD_DIM // 8])
    return unpacked(tl.permute(words, (1, 0, 2, 4, 3)), TOKENS, HEAD_DIM, DTYPE)


@triton.jit
def _in_order_of_k(q, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Transpose queries ``[ROWS, HEAD_DIM]``, and permute their dimensions to the order of `_k_tile`."""
    q = tl.reshape(q, [ROWS, HEAD_DIM // 64, 4, 8, 2])
    return tl.reshape(tl.permute(q, (1, 3, 2, 4, 0)), [HEAD_DIM, ROWS])


@triton.jit
def _v_tile(loaded, HEAD_DIM: tl.constexpr):
    """Convert a loaded tile of V to ``[HEAD_DIM, TOKENS]`` bfloat16, times `BFLOAT_UNIT`.

    The dimensions are permuted; `store_rows` expects the same order.
    """
    PARTS: tl.constexpr = HEAD_DIM // 32  # dimensions per lane
    pairs = ()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(TOKENS // 8):
            pairs = pairs + (int8_pair_to_bf16x2(loaded[2 * i], loaded[2 * i + 1], part),)
    words = tl.reshape(joined(pairs, PARTS * TOKENS // 8), [WARPS, 8, 4, PARTS // 2, 2, TOKENS // 8])
    return unpacked(tl.permute(words, (3, 0, 4, 1, 5, 2)), HEAD_DIM, TOKENS, tl.bfloat16)


@triton.jit
def _parts(x, COUNT: tl.constexpr):
    """Split ``x [a, b, COUNT]`` along its last dimension into COUNT tensors ``[a, b]``.

    The order of these tensors depends only on COUNT, so two calls with the same COUNT have the same order.
    """
    if COUNT == 1:
        return (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], COUNT // 2, 2]))
        return _parts(even, COUNT // 2) + _parts(odd, COUNT // 2)


@triton.jit
def _by_lanes(rows, ROWS: tl.constexpr):
    """Give each lane the elements of ``rows [ROWS]`` for the rows that the lane stores: ``[lanes, 1, ROWS / 4]``."""
    rows = tl.broadcast_to(tl.reshape(rows, [1, ROWS // 8, 4, 2]), [WARPS * 8, ROWS // 8, 4, 2])
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3)), [WARPS * 32, 1, ROWS // 4])


@triton.jit
def store_rows(ptr, at, is_row, out, factors, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Multiply the outputs of `attend_rows` by their ``factors [ROWS]``, and store them.

    ``out`` is ``[HEAD_DIM, ROWS]``, with the dimensions in the order of `_v_tile`. Row i is stored at ``ptr + at[i] *
    HEAD_DIM``, but only if ``is_row[i]``. ``at [ROWS]`` is int64. A lane stores adjacent dimensions of each of its
    rows.
    """
    LANES: tl.constexpr = WARPS * 32
    PARTS: tl.constexpr = HEAD_DIM // 32
    out = tl.reshape(out, [HEAD_DIM // 64, WARPS, 2, 8, ROWS // 8, 4, 2])
    out = tl.reshape(tl.permute(out, (1, 3, 5, 0, 2, 4, 6)), [LANES, PARTS, ROWS // 4])
    outs = _parts(out, ROWS // 4)
    ats = _parts(_by_lanes(tl.where(is_row, at, -1), ROWS), ROWS // 4)
    factors = _parts(_by_lanes(factors, ROWS), ROWS // 4)
    dims = (tl.arange(0, LANES) // 4 * PARTS)[:, None] + tl.arange(0, PARTS)[None, :]
    for i in tl.static_range(ROWS // 4):
        tl.store(ptr + ats[i] * HEAD_DIM + dims, outs[i] * factors[i], mask=ats[i] >= 0)


@triton.jit
def _ids(table_ptr, position, at, end, BLOCK_SIZE: tl.constexpr):
    """Load the block ids of tokens ``position + at``. Tokens from ``end`` on get the last token's block."""
    block = position // BLOCK_SIZE
    if BLOCK_SIZE < TOKENS:
        block += at // BLOCK_SIZE
    return tl.load(table_ptr + tl.minimum(block, (end - 1) // BLOCK_SIZE))


@triton.jit
def _in_blocks(ptr, ids, position, STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the address that each lane reads in the tile from token ``position`` on. ``ids`` are the lanes' block ids.

    ``ptr`` is each lane's address for a tile at the start of block 0. STRIDE and BLOCK_STRIDE are the distances from
    token to token and from block to block. If a block holds several tiles, the tile's offset in the block is added.
    """
    at = ptr + ids.to(tl.int64) * BLOCK_STRIDE
    if BLOCK_SIZE > TOKENS:
        at += position % BLOCK_SIZE * STRIDE
    return at


@triton.jit
def _load_k(k_ptr, ids, position, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Load each lane's part of a tile of K, as 32-bit words of four int8 values.

    Returns one tensor ``[lanes, 4]`` for every 64 dimensions. Words of tokens after the end of the context are
    arbitrary.
    """
    at = _in_blocks(k_ptr, ids, position, STRIDE, STRIDE * BLOCK_SIZE, BLOCK_SIZE)
    words = ()
    for chunk in tl.static_range(HEAD_DIM // 64):
        words = words + (tl.load((at + chunk * 16)[:, None] + tl.arange(0, 4)[None, :]),)
    return words


@triton.jit
def _v_ids(table_ptr, position, at, end, BLOCK_SIZE: tl.constexpr):
    """Load the block ids of each lane's tokens of V. In every eight tokens, a lane has two: tokens ``at`` and ``at +
    1``.

    With blocks of 8 or more tokens, return one id per block. With blocks of 2 or 4 tokens, return one id for every
    eight tokens, because the lane's two tokens are in one block. With blocks of 1 token, return an id for each of the
    two tokens.
    """
    ids = ()
    for i in tl.static_range(0, TOKENS, max(8, min(TOKENS, BLOCK_SIZE))):
        for n in tl.static_range(2 if BLOCK_SIZE == 1 else 1):
            if BLOCK_SIZE >= 8:
                ids = ids + (_ids(table_ptr, position, i, end, BLOCK_SIZE),)
            else:
                ids = ids + (_ids(table_ptr, position, i + at + n, end, BLOCK_SIZE),)
    return ids


@triton.jit
def _load_v(v_ptr, ids, position, BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Load each lane's part of a tile of V.

    Returns one int32 tensor ``[lanes]`` for each of a lane's tokens. An int32 packs the adjacent dimensions that the
    lane multiplies. Values of tokens after the end of the context are arbitrary.
    """
    numbers = ()
    for i in tl.static_range(TOKENS // 8):
        for n in tl.static_range(2):
            if BLOCK_SIZE == 1:
                block = ids[2 * i + n]
            else:
                block = ids[i // max(1, min(TOKENS, BLOCK_SIZE) // 8)]
            at = _in_blocks(v_ptr, block, position, STRIDE, STRIDE * BLOCK_SIZE, BLOCK_SIZE)
            numbers = numbers + (tl.load(at + (8 * i + n) % BLOCK_SIZE * STRIDE).to(tl.int32),)
    return numbers


@triton.jit
def _load_scales(ptr, ids, position, at, end, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    at_scale = _in_blocks(ptr, ids, position, 1, KV_HEADS * BLOCK_SIZE, BLOCK_SIZE)
    return tl.load(at_scale, mask=position + at < end, other=0.0)


@triton.jit
def _load_keys(
    k_ptr, k_scales_ptr, v_scales_ptr, ids, position, at, end,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Load each lane's part of a tile of K (see `_load_k`), and the scales of K and V for the lane's tokens."""
    k = _load_k(k_ptr, ids, position, HEAD_DIM, BLOCK_SIZE, KV_HEADS * HEAD_DIM // 4)
    k_scales = _load_scales(k_scales_ptr, ids, position, at, end, BLOCK_SIZE, KV_HEADS)
    v_scales = _load_scales(v_scales_ptr, ids, position, at, end, BLOCK_SIZE, KV_HEADS)
    return k, k_scales, v_scales


@triton.jit
def _prefetch(
    tokens_ptr, scales_ptr, ids, position, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, SLOT: tl.constexpr
):
    """Prefetch one token of K or V, and its scale, into the L2, for each lane.

    Both pointers are addresses in bytes (int64).
    """
    token = _in_blocks(tokens_ptr, ids, position, SLOT, SLOT * BLOCK_SIZE, BLOCK_SIZE)
    scale = _in_blocks(scales_ptr, ids, position, 4, 4 * KV_HEADS * BLOCK_SIZE, BLOCK_SIZE)
    prefetch_l2(token)
    prefetch_l2(scale)


@triton.jit
def _by_rows(x):
    """Reshape the lanes' values, one for each token of K, to ``[TOKENS, 1, 4, 1]``.

    That shape broadcasts to the shape of scores, ``[TOKENS, ROWS / 8, 4, 2]``.
    """
    x = tl.permute(tl.reshape(x, [2, WARPS, 8, 4]), (1, 0, 2, 3))
    return tl.reshape(x, [TOKENS, 1, 4, 1])


@triton.jit
def _token_pairs(x):
    """Split ``x [TOKENS, …]`` into two tensors ``[TOKENS / 2, …]``: each lane's first token, and its second."""
    x = tl.reshape(x, [WARPS, 2, 8, x.shape[1], x.shape[2], x.shape[3]])
    first, second = tl.split(tl.permute(x, (0, 2, 3, 4, 5, 1)))
    shape: tl.constexpr = [TOKENS // 2, first.shape[2], first.shape[3], first.shape[4]]
    return tl.reshape(first, shape), tl.reshape(second, shape)


@triton.jit
def _scores(k, q, k_scales, v_scales, valid, factor, ROWS: tl.constexpr):
    """Return two results for a tile of tokens: the scores, and for each token the inverse of V's scale.

    Scores are in base 2. The logarithm of V's scale is added to each score, so the softmax weights include V's scale.
    The inverse removes V's scale again where weights are added up.
    """
    products = finished(dot(k, q, tl.zeros([TOKENS, ROWS], tl.float32)))
    bias = logarithm(tl.maximum(v_scales, _LEAST, propagate_nan=tl.PropagateNan.ALL))
    inverse = power(-bias)  # the exact inverse of the rounded logarithm
    bias = tl.where(valid, bias, float("-inf"))
    return tl.reshape(products, [TOKENS, ROWS // 8, 4, 2]) * _by_rows(k_scales * factor) + _by_rows(bias), inverse


@triton.jit
def _first_tile(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_at, v_at, begin, end,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Load the first tile of K and V, and the block ids of the second tile.

    Returns: K, V, the scales of K and V; then the block ids for K and for V.
    """
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
    PARTS: tl.constexpr = HEAD_DIM // 32
    k_ids = _ids(table_ptr, begin, k_at, end, BLOCK_SIZE)
    v_ids = _v_ids(table_ptr, begin, v_at, end, BLOCK_SIZE)
    k, k_scales, v_scales = _load_keys(
        k_ptr, k_scales_ptr, v_scales_ptr, k_ids, begin, k_at, end, HEAD_DIM, BLOCK_SIZE, KV_HEADS
    )
    v = _load_v(v_ptr, v_ids, begin, BLOCK_SIZE, SLOT // PARTS)
    k_ids = _ids(table_ptr, begin + TOKENS, k_at, end, BLOCK_SIZE)
    v_ids = _v_ids(table_ptr, begin + TOKENS, v_at, end, BLOCK_SIZE)
    return k, v, k_scales, v_scales, k_ids, v_ids


@triton.jit
def attend_rows(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, begin, end, scale_log2e,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Compute attention of ``q [ROWS, HEAD_DIM]`` over tokens ``begin … end - 1``.

    ``begin`` must be the start of a block, or of a tile inside a larger block. ``end`` must be larger.

    Returns:
        Unnormalized outputs ``[HEAD_DIM, ROWS]``; the factors ``[ROWS]`` by which `store_rows` multiplies them;
        log-sum-exps ``[ROWS]`` in base 2. All are float32.
    """
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
    PARTS: tl.constexpr = HEAD_DIM // 32
    lanes = tl.arange(0, TOKENS * 4)
    k_at = lanes // 32 % WARPS * 16 + lanes // (32 * WARPS) * 8 + lanes // 4 % 8
    v_at = tl.arange(0, WARPS * 32) % 4 * 2
    both = tl.arange(0, TOKENS * 2)  # tokens of K, then of V
    far_at, is_v = both % TOKENS, both >= TOKENS
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    k_scales_ptr += kv_head * BLOCK_SIZE
    v_scales_ptr += kv_head * BLOCK_SIZE
    far_tokens = tl.where(is_v, v_ptr.to(tl.int64), k_ptr.to(tl.int64)) + far_at % BLOCK_SIZE * SLOT
    far_scales = tl.where(is_v, v_scales_ptr.to(tl.int64), k_scales_ptr.to(tl.int64)) + far_at % BLOCK_SIZE * 4
    k_ptr = k_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + lanes % 4 * 4 + k_at % BLOCK_SIZE * (SLOT // 4)
    if HEAD_DIM == 128:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    v_ptr += tl.arange(0, WARPS * 32) // 4 + v_at % BLOCK_SIZE * (SLOT // PARTS)
    k_scales_ptr += k_at % BLOCK_SIZE
    v_scales_ptr += k_at % BLOCK_SIZE

    k, v, k_scales, v_scales, k_ids, v_ids = _first_tile(
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_at, v_at, begin, end, HEAD_DIM, BLOCK_SIZE, KV_HEADS
    )
    for i in tl.static_range(1, _AHEAD + 1):
        far_ids = _ids(table_ptr, begin + i * TOKENS, far_at, end, BLOCK_SIZE)
        _prefetch(far_tokens, far_scales, far_ids, begin + i * TOKENS, BLOCK_SIZE, KV_HEADS, SLOT)

    q = _in_order_of_k(q, ROWS, HEAD_DIM)
    factor = scale_log2e * (1.0 / BFLOAT_UNIT if q.dtype == tl.bfloat16 else 1.0)

    anchor = tl.full([1, ROWS // 8, 4, 2], -1e30, tl.float32)
    totals = tl.zeros([TOKENS // 2, ROWS // 8, 4, 2], tl.float32)
    out = tl.zeros([HEAD_DIM, ROWS], tl.float32)
    anchor_at = begin
    goes_on = True
    while goes_on:
        totals = tl.zeros([TOKENS // 2, ROWS // 8, 4, 2], tl.float32)
        out = tl.zeros([HEAD_DIM, ROWS], tl.float32)
        for position in range(begin, end, TOKENS):
            following, far = position + TOKENS, position + (_AHEAD + 1) * TOKENS
            far_ids = _ids(table_ptr, far, far_at, end, BLOCK_SIZE)
            k_tile, old_k_scales, old_v_scales = _k_tile(k, HEAD_DIM, q.dtype), k_scales, v_scales
            k, k_scales, v_scales = _load_keys(
                k_ptr, k_scales_ptr, v_scales_ptr, k_ids, following, k_at, end, HEAD_DIM, BLOCK_SIZE, KV_HEADS
            )
            k_ids = _ids(table_ptr, following + TOKENS, k_at, end, BLOCK_SIZE)
            scores, inverse = _scores(k_tile, q, old_k_scales, old_v_scales, position + k_at < end, factor, ROWS)
            if position == anchor_at:
                anchor = tl.max(scores, 0, keep_dims=True)
            weights = power(scores - anchor)  # times V's scales
            first, second = _token_pairs(weights)
            first_inverse, second_inverse = _token_pairs(_by_rows(inverse))
            totals += first * first_inverse
            totals += second * second_inverse
            weights = tl.reshape(weights, [TOKENS, ROWS]).to(tl.bfloat16)
            v_tile = _v_tile(v, HEAD_DIM)
            v = _load_v(v_ptr, v_ids, following, BLOCK_SIZE, SLOT // PARTS)
            out = finished(dot(v_tile, weights, out))
            v_ids = _v_ids(table_ptr, following + TOKENS, v_at, end, BLOCK_SIZE)
            _prefetch(far_tokens, far_scales, far_ids, far, BLOCK_SIZE, KV_HEADS, SLOT)
        is_wrong = tl.sum(out * 0.0) != 0.0  # NaN if any is infinite or NaN
        goes_on = is_wrong & (anchor_at == begin)
        if goes_on:
            anchor_at = -1
            anchor = tl.full([1, ROWS // 8, 4, 2], -1e30, tl.float32)
            for position in tl.range(begin, end, TOKENS, num_stages=1):
                k_ids = _ids(table_ptr, position, k_at, end, BLOCK_SIZE)
                k, k_scales, v_scales = _load_keys(
                    k_ptr, k_scales_ptr, v_scales_ptr, k_ids, position, k_at, end, HEAD_DIM, BLOCK_SIZE, KV_HEADS
                )
                scores, inverse = _scores(
                    _k_tile(k, HEAD_DIM, q.dtype), q, k_scales, v_scales, position + k_at < end, factor, ROWS
                )
                anchor = tl.maximum(anchor, tl.max(scores, 0, keep_dims=True))
            k, v, k_scales, v_scales, k_ids, v_ids = _first_tile(
                k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, k_at, v_at, begin, end,
                HEAD_DIM, BLOCK_SIZE, KV_HEADS,
            )  # fmt: skip
    total = tl.sum(totals, 0, keep_dims=True)
    factors = tl.reshape(reciprocal(total) * (1.0 / BFLOAT_UNIT), [ROWS])
    return out, factors, tl.reshape(anchor + logarithm(total), [ROWS])


def takes(q: Tensor, pages: Pages) -> bool:
    """Return whether `attend_rows` supports this cache, these queries and this GPU.

    The requirements are: an 8-bit cache, 16-bit queries, heads of 64 or 128, and a GPU with bfloat16 (compute
    capability 8.0).
    """
    of_16_bits = q.element_size() == 2 and q.shape[2] in (64, 128)
    return pages.k_scales is not None and of_16_bits and has_int8_mma(q.device)
