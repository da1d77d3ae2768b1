"""Attention of a few queries over a cache in 8 bits, by lanes: products of whole numbers, and no number is converted.

K and V go from memory to registers as they lie there, and are operands of the matrix unit as they are. So the other
operands are whole numbers too: queries, and weights of the softmax, as 16 bits of their largest, in two digits of 8
bits. Two digits of four heads fill the eight columns of an ``mma``, which sums them exactly, in 32 bits. Nothing is in
shared memory, and no warp waits for another before its part of the context ends.

A tensor has one element for each of the program's threads. A warp walks through the context, 32 tokens at a time, with
a running softmax of its own. Lane 4r + t has

- of K, tokens 4r to 4r + 3, dimensions 64j + 16t to 64j + 16t + 15: what ``mma`` wants of rows r and r + 8, up to the
  order of the dimensions, in which the queries are put too;
- scores, weights and scales of those tokens, for head t: what ``mma`` gives, both digits of a head in one lane;
- of V, tokens 8t to 8t + 7, a part of the dimensions for each r, transposed by fours: what ``mma`` wants of rows of V
  transposed. One instruction, ``movmatrix``, brings weights to the lanes that have their tokens of V;
- of the output, those dimensions, for head t: so a running softmax's correction is at hand.
"""

# ruff: noqa: RUF005 (Triton adds tuples and unpacks none)
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages
from minillm.kernels.compat import has_whole_products
from minillm.kernels.lane_products import by_number, mma, turned, two_digits
from minillm.kernels.low_bit_lanes import fours

TOKENS = tl.constexpr(32)  # of a warp's tile
HEADS = tl.constexpr(4)  # of an mma: its eight columns are two digits of each
_Q_LARGEST = tl.constexpr(32639.0)  # 127 * 256 + 127: two digits with signs
_WEIGHT_LARGEST = tl.constexpr(65535.0)  # two digits without
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to a float32 number it leaves no room for fractions
_WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _over_rows(x, WARPS: tl.constexpr, SUM: tl.constexpr = False):
    """The largest of the lanes 4r + t of all r, or their sum, for each of them."""
    x = tl.reshape(x, [WARPS, 8, 4])
    x = tl.sum(x, 1, keep_dims=True) if SUM else tl.max(x, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(x, [WARPS, 8, 4]), [WARPS * 32])


@triton.jit
def _columns(words, LANES: tl.constexpr, COUNT: tl.constexpr):
    """The columns of ``[lanes, 2 or 4]``."""
    if COUNT == 4:
        return fours(words, LANES)
    else:
        first, second = tl.split(words)
        return first, second


@triton.jit
def _bits(x):
    """The bits of magnitudes: as whole numbers, finite ones come before infinity before NaN."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def load_queries(
    q_ptr, head_stride, scale_log2e, TILE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Four heads' queries as ``mma`` wants them, `HEAD_DIM` / 16 words, and what a product of head t is to be times.

    A query is whole numbers up to `_Q_LARGEST` times a scale. What is not finite has NaN as its scale.
    """
    LANES: tl.constexpr = WARPS * 32
    lanes = tl.arange(0, LANES)
    r, t = lanes % 32 // 4, lanes % 4
    # Column r is a digit of head r / 2.
    head = TILE * HEADS + r // 2
    dims = t[:, None] * 16 + tl.arange(0, 16)[None, :]
    at = q_ptr + head[:, None] * head_stride + dims
    is_head = (head < GROUP)[:, None] & (dims < 64)
    numbers, largest = (), tl.zeros([LANES], tl.int32)
    for chunk in tl.static_range(HEAD_DIM // 64):
        x = tl.load(at + chunk * 64, mask=is_head, other=0.0).to(tl.float32)
        numbers = numbers + (x,)
        largest = tl.maximum(largest, tl.max(_bits(x), 1))
    largest = tl.max(tl.reshape(largest, [LANES // 4, 4]), 1, keep_dims=True)
    largest = tl.reshape(tl.broadcast_to(largest, [LANES // 4, 4]), [LANES]).to(tl.float32, bitcast=True)
    growth = tl.where((largest > 1e-30) & (largest < 1e30), _Q_LARGEST / largest, 0.0)
    shifts = (tl.arange(0, 4) * 8)[None, None, :]
    words = ()
    for chunk in tl.static_range(HEAD_DIM // 64):
        whole = (numbers[chunk] * growth[:, None] + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
        low = ((whole + 128) & 255) - 128
        digit = tl.where((r % 2 == 0)[:, None], (whole - low) >> 8, low) & 255
        words = words + fours(tl.sum(tl.reshape(digit, [LANES, 4, 4]) << shifts, 2), LANES)
    # Head t's largest number again, for the lanes that have its scores.
    head = TILE * HEADS + t
    PART: tl.constexpr = HEAD_DIM // 8
    at = q_ptr + head[:, None] * head_stride + (r[:, None] * PART + tl.arange(0, PART)[None, :])
    x = tl.load(at, mask=(head < GROUP)[:, None], other=0.0).to(tl.float32)
    bits = _over_rows(tl.max(_bits(x), 1), WARPS)
    largest = bits.to(tl.float32, bitcast=True)
    factor = tl.where(largest > 1e-30, largest * (1 / _Q_LARGEST) * scale_log2e, 0.0)
    return words, tl.where(largest < 1e30, factor, float("nan"))


@triton.jit
def _block_ids(table_ptr, tokens, end, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The ids of a lane's COUNT tokens from ``tokens`` on, one for each block; behind the end a block that exists."""
    ids = ()
    for i in tl.static_range(0, COUNT, min(COUNT, BLOCK_SIZE)):
        ids = ids + (tl.load(table_ptr + (tokens + i) // BLOCK_SIZE, mask=tokens + i < end, other=0),)
    return ids


@triton.jit
def _load_rows(
    words_ptr, ids, tokens, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT_WORDS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A lane's words of COUNT tokens: for each, WORDS of each of its chunks. ``words_ptr`` is the lane's first."""
    rows = ()
    for i in tl.static_range(COUNT):
        block = ids[i // min(COUNT, BLOCK_SIZE)].to(tl.int64)
        at = words_ptr + block * (BLOCK_SIZE * SLOT_WORDS) + (tokens % BLOCK_SIZE) * SLOT_WORDS
        at += i % min(COUNT, BLOCK_SIZE) * SLOT_WORDS
        for chunk in tl.static_range(CHUNKS):
            rows = rows + (tl.load((at + chunk * CHUNK_WORDS)[:, None] + tl.arange(0, WORDS)[None, :]),)
    return rows


@triton.jit
def _load_scales(
    scales_ptr, ids, tokens, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The scales of a lane's four tokens; ``scales_ptr`` is the head's first."""
    if BLOCK_SIZE >= 4:
        at = scales_ptr + ids[0].to(tl.int64) * (KV_HEADS * BLOCK_SIZE) + tokens % BLOCK_SIZE
        return fours(tl.load(at[:, None] + tl.arange(0, 4)[None, :]), LANES)
    else:
        scales = ()
        for i in tl.static_range(4):
            at = scales_ptr + ids[i // BLOCK_SIZE].to(tl.int64) * (KV_HEADS * BLOCK_SIZE) + i % BLOCK_SIZE
            scales = scales + (tl.load(at),)
        return scales


@triton.jit
def attend_lanes(
    queries, factors, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, begin, start, end,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The softmax of each warp over its tiles of tokens ``begin … end - 1``, of which none before ``start`` is seen.

    Args:
        queries, factors: of `load_queries`, for each four heads.
        k_ptr, v_ptr: the layer's caches, as words of 32 bits.
        begin: a multiple of 8.

    Returns:
        For each four heads: the maxima, and for each lane's tokens the sums; and of all heads, one four behind the
        other, a lane's outputs, not yet divided.
    """
    LANES: tl.constexpr = WARPS * 32
    TILES: tl.constexpr = len(factors)
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM // 4  # words
    K_CHUNKS: tl.constexpr = HEAD_DIM // 64
    V_WORDS: tl.constexpr = min(4, HEAD_DIM // 32)
    V_CHUNKS: tl.constexpr = HEAD_DIM // (32 * V_WORDS)
    lanes = tl.arange(0, LANES)
    warp, r, t = lanes // 32, lanes % 32 // 4, lanes % 4
    k_ptr += kv_head * (HEAD_DIM // 4) + t * 4
    v_ptr += kv_head * (HEAD_DIM // 4) + r * V_WORDS
    k_scales_ptr += kv_head * BLOCK_SIZE
    v_scales_ptr += kv_head * BLOCK_SIZE
    k_tokens = begin + warp * TOKENS + r * 4
    v_tokens = begin + warp * TOKENS + t * 8
    STEP: tl.constexpr = WARPS * TOKENS
    k_ids = _block_ids(table_ptr, k_tokens, end, 4, BLOCK_SIZE)
    v_ids = _block_ids(table_ptr, v_tokens, end, 8, BLOCK_SIZE)
    k = _load_rows(k_ptr, k_ids, k_tokens, 4, BLOCK_SIZE, SLOT, K_CHUNKS, 16, 4)
    k_scales = _load_scales(k_scales_ptr, k_ids, k_tokens, BLOCK_SIZE, KV_HEADS, LANES)
    v_scales = _load_scales(v_scales_ptr, k_ids, k_tokens, BLOCK_SIZE, KV_HEADS, LANES)
    v = _load_rows(v_ptr, v_ids, v_tokens, 8, BLOCK_SIZE, SLOT, V_CHUNKS, 8 * V_WORDS, V_WORDS)
    k_ids = _block_ids(table_ptr, k_tokens + STEP, end, 4, BLOCK_SIZE)
    v_ids = _block_ids(table_ptr, v_tokens + STEP, end, 8, BLOCK_SIZE)
    nothing = tl.zeros([LANES], tl.int32)
    zeros = tl.zeros([LANES], tl.float32)
    maxima, totals, outs = (), (), ()
    for _ in tl.static_range(TILES):
        maxima, totals = maxima + (zeros - float("inf"),), totals + (zeros,)
    for _ in tl.static_range(TILES * V_CHUNKS * V_WORDS * 4):
        outs = outs + (zeros,)
    for position in range(begin, end, STEP):
        k_tokens = position + warp * TOKENS + r * 4
        v_tokens = position + warp * TOKENS + t * 8
        products = ()
        for tile in tl.static_range(TILES):
            for pair in tl.static_range(2):
                sums = (nothing, nothing, nothing, nothing)
                for chunk in tl.static_range(K_CHUNKS):
                    upper = fours(k[2 * pair * K_CHUNKS + chunk], LANES)
                    lower = fours(k[(2 * pair + 1) * K_CHUNKS + chunk], LANES)
                    q = queries[tile]
                    sums = mma(
                        (upper[0], upper[1]), (lower[0], lower[1]), (q[4 * chunk], q[4 * chunk + 1]), sums,
                        False, WARPS,
                    )  # fmt: skip
                    sums = mma(
                        (upper[2], upper[3]), (lower[2], lower[3]), (q[4 * chunk + 2], q[4 * chunk + 3]), sums,
                        False, WARPS,
                    )  # fmt: skip
                products = products + sums
        now_k_scales, now_v_scales = k_scales, v_scales
        k = _load_rows(k_ptr, k_ids, k_tokens + STEP, 4, BLOCK_SIZE, SLOT, K_CHUNKS, 16, 4)
        k_scales = _load_scales(k_scales_ptr, k_ids, k_tokens + STEP, BLOCK_SIZE, KV_HEADS, LANES)
        v_scales = _load_scales(v_scales_ptr, k_ids, k_tokens + STEP, BLOCK_SIZE, KV_HEADS, LANES)
        k_ids = _block_ids(table_ptr, k_tokens + 2 * STEP, end, 4, BLOCK_SIZE)
        visible, scales = (), ()
        for i in tl.static_range(4):
            seen = (k_tokens + i >= start) & (k_tokens + i < end)
            visible = visible + (seen,)
            scales = scales + (tl.where(seen, now_v_scales[i], 0.0),)
        new_maxima, new_totals, corrections, growths, weights = (), (), (), (), ()
        for tile in tl.static_range(TILES):
            scores, largest = (), maxima[tile]
            for i in tl.static_range(4):
                # A NaN among V's scales comes to light in the sum of the weights.
                scale = (now_k_scales[i] + 0.0 * now_v_scales[i]) * factors[tile]
                product = products[8 * tile + 2 * i] * 256 + products[8 * tile + 2 * i + 1]
                score = tl.where(visible[i], tl.cast(product, tl.float32) * scale, float("-inf"))
                scores = scores + (score,)
                largest = tl.maximum(largest, score)
            largest = _over_rows(largest, WARPS)
            anchor = tl.where(largest == float("-inf"), 0.0, largest)  # of a warp that has seen no token
            correction = tl.exp2(maxima[tile] - anchor)
            total, scaled, most = totals[tile] * correction, (), zeros
            for i in tl.static_range(4):
                weight = tl.exp2(scores[i] - anchor)
                total += weight
                weight *= scales[i]
                most = tl.maximum(most, weight)
                scaled = scaled + (weight,)
            most = _over_rows(most, WARPS)
            growth = tl.where(most > 1e-30, _WEIGHT_LARGEST / most, 0.0)
            whole = ()
            for i in tl.static_range(4):
                whole = whole + ((scaled[i] * growth + _WHOLE).to(tl.int32, bitcast=True),)
            weights = weights + (
                (turned(two_digits(whole[0], whole[1]), WARPS), turned(two_digits(whole[2], whole[3]), WARPS)),
            )
            new_maxima, new_totals = new_maxima + (largest,), new_totals + (total,)
            corrections, growths = corrections + (correction,), growths + (most * (1 / _WEIGHT_LARGEST),)
        maxima, totals = new_maxima, new_totals
        new_outs = ()
        for word in tl.static_range(V_CHUNKS * V_WORDS):
            rows = ()
            for i in tl.static_range(8):
                rows = rows + (_columns(v[i * V_CHUNKS + word // V_WORDS], LANES, V_WORDS)[word % V_WORDS],)
            # Weights come by pairs of tokens: 8t, 8t + 1, 8t + 4, 8t + 5 in the first word, the others in the second.
            first = by_number(rows[0], rows[1], rows[4], rows[5])
            second = by_number(rows[2], rows[3], rows[6], rows[7])
            for tile in tl.static_range(TILES):
                for pair in tl.static_range(2):
                    sums = mma(
                        (first[2 * pair], second[2 * pair]), (first[2 * pair + 1], second[2 * pair + 1]),
                        weights[tile], (nothing, nothing, nothing, nothing), True, WARPS,
                    )  # fmt: skip
                    for row in tl.static_range(2):
                        product = (sums[2 * row] * 256 + sums[2 * row + 1]).to(tl.float32)
                        out = outs[(tile * V_CHUNKS * V_WORDS + word) * 4 + 2 * pair + row]
                        new_outs = new_outs + (out * corrections[tile] + product * growths[tile],)
        outs = ()
        for tile in tl.static_range(TILES):
            for word in tl.static_range(V_CHUNKS * V_WORDS):
                for place in tl.static_range(4):
                    outs = outs + (new_outs[(word * TILES + tile) * 4 + place],)
        v = _load_rows(v_ptr, v_ids, v_tokens + STEP, 8, BLOCK_SIZE, SLOT, V_CHUNKS, 8 * V_WORDS, V_WORDS)
        v_ids = _block_ids(table_ptr, v_tokens + 2 * STEP, end, 8, BLOCK_SIZE)
    return maxima, totals, outs


@triton.jit
def merge_warps(maximum, total, numbers, WARPS: tl.constexpr):
    """One softmax of four heads from that of all warps, from `attend_lanes`.

    Returns:
        Maximum and sum, ``[32]``, and outputs divided by it, ``[32, HEAD_DIM / 8]``, for head t in lane 4r + t.
    """
    COUNT: tl.constexpr = len(numbers)
    for level in tl.static_range(5):
        if COUNT >> (level + 1):
            joined = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                joined = joined + (tl.join(numbers[i], numbers[(COUNT >> (level + 1)) + i]),)
            numbers = joined
    out = tl.reshape(numbers[0], [WARPS, 32, COUNT])
    maxima = tl.reshape(maximum, [WARPS, 32])
    totals = tl.reshape(_over_rows(total, WARPS, True), [WARPS, 32])
    maximum = tl.max(maxima, 0)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    corrections = tl.exp2(maxima - anchor[None, :])
    total = tl.sum(totals * corrections, 0)
    divisor = tl.where(total > 0, total, 1.0)
    divisor = tl.where(total == total, divisor, float("nan"))
    out = tl.sum(out * corrections[:, :, None], 0) / divisor[:, None]
    return maximum, divisor, out


@triton.jit
def store_heads(
    out_ptr, lse_ptr, head_stride, maximum, divisor, out, TILE: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store four heads' outputs, and with an address for them their log-sum-exps, base 2; addresses are the group's."""
    lanes = tl.arange(0, 32)
    head = TILE * HEADS + lanes % 4
    numbers = tl.arange(0, HEAD_DIM // 8)
    part: tl.constexpr = min(16, HEAD_DIM // 8)
    dims = (numbers // part * 128)[None, :] + (lanes // 4 * part)[:, None] + (numbers % part)[None, :]
    at = out_ptr + head[:, None] * head_stride + dims
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=(head < GROUP)[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + head, maximum + tl.log2(divisor), mask=(head < GROUP) & (lanes < 4))


@triton.jit
def attend_group(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, q_head_stride, out_head_stride,
    scale_log2e, kv_head, start, end,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Attention of a kv head's query heads over tokens ``start … end - 1``: outputs, and log-sum-exps if wanted.

    ``q_ptr``, ``out_ptr`` and ``lse_ptr`` are the first query head's.
    """
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    NUMBERS: tl.constexpr = HEAD_DIM // 8
    queries, factors = (), ()
    for tile in tl.static_range(TILES):
        words, factor = load_queries(q_ptr, q_head_stride, scale_log2e, tile, GROUP, HEAD_DIM, WARPS)
        queries, factors = queries + (words,), factors + (factor,)
    maxima, totals, outs = attend_lanes(
        queries, factors, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, start // 8 * 8, start, end,
        HEAD_DIM, BLOCK_SIZE, KV_HEADS, WARPS,
    )  # fmt: skip
    for tile in tl.static_range(TILES):
        maximum, divisor, out = merge_warps(
            maxima[tile], totals[tile], outs[tile * NUMBERS : (tile + 1) * NUMBERS], WARPS
        )  # fmt: skip
        store_heads(out_ptr, lse_ptr, out_head_stride, maximum, divisor, out, tile, GROUP, HEAD_DIM)


def takes(q: Tensor, pages: Pages) -> bool:
    """Whether the lanes can read a cache: in 8 bits, for queries of 16 bits, on a GPU from 8.0 on."""
    head_dim, group = q.shape[2], q.shape[1] // pages.k.shape[2]
    fits = pages.k_scales is not None and q.element_size() == 2 and head_dim in (64, 128) and group <= 8
    return fits and has_whole_products(q.device)
