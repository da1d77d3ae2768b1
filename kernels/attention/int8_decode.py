"""Attention of a few queries over an 8-bit cache: a lane kernel (see docs/kernels.md) with int8 matmuls.

K and V are not converted. They go from memory to registers as they are stored, and are direct operands of the tensor
cores. The other operands must therefore be integers as well. Queries and softmax weights are 16-bit integers relative
to their maximum, split into two 8-bit digits. The two digits of four heads fill the eight columns of an ``mma``, which
sums them exactly, in 32 bits. Nothing is in shared memory. The warps of a program work independently, and merge their
results at the end.

In a lane kernel, a tensor has one element for each of the program's threads. A warp iterates over the context, 32
tokens at a time, with its own running softmax. Lane 4r + t of a warp holds

- K of tokens 4r to 4r + 3, in dimensions 64j + 16t to 64j + 16t + 15 for each j: the operand of ``mma`` for rows r and
  r + 8. (K's dimensions are thus in another order, which the queries share.)
- Scores, weights and scales of the same tokens, for head t. ``mma`` leaves both digits of a head in one lane.
- V of tokens 8t to 8t + 7, in a part of the dimensions that depends on r, transposed in 4 x 4 tiles: the operand of
  ``mma`` for rows of V transposed. One instruction, ``movmatrix``, moves weights to the lanes with their tokens of V.
- The output in the same dimensions as V, for head t, so that the lane can apply the running softmax's correction.
"""

# ruff: noqa: RUF005 (Triton cannot unpack tuples)
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Pages
from minillm.kernels.compat import has_int8_mma
from minillm.kernels.lanes import bytes_at, mma, of_eights, power, transpose4x4_bytes, transpose8x8, two_digits
from minillm.kernels.linear.low_bit.lanes import columns4

TOKENS = tl.constexpr(32)  # of a warp's tile
HEADS = tl.constexpr(4)  # per mma: its eight columns are two digits of each head
_Q_LARGEST = tl.constexpr(32639.0)  # 127 * 256 + 127: two signed digits
_WEIGHT_LARGEST = tl.constexpr(65535.0)  # two unsigned digits
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a float32 drops the fraction


@triton.jit
def _over_rows(x, WARPS: tl.constexpr, SUM: tl.constexpr = False):
    """Return in each lane 4r + t the maximum of ``x`` over the lanes with the same t, or the sum if SUM."""
    x = tl.reshape(x, [WARPS, 8, 4])
    x = tl.sum(x, 1, keep_dims=True) if SUM else tl.max(x, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(x, [WARPS, 8, 4]), [WARPS * 32])


@triton.jit
def _columns(words, LANES: tl.constexpr, COUNT: tl.constexpr):
    """Split ``words [lanes, COUNT]`` into its COUNT columns, 2 or 4."""
    if COUNT == 4:
        return columns4(words, LANES)
    else:
        first, second = tl.split(words)
        return first, second


@triton.jit
def load_queries(
    q_ptr, head_stride, TILE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Load the queries of four heads (tile number TILE) without converting them.

    Each lane gets HEAD_DIM / 4 values, in tensors of four words. `digits` converts them.
    """
    lanes = tl.arange(0, WARPS * 32)
    head = TILE * HEADS + lanes % 32 // 8  # column r is a digit of head r / 2
    first = (q_ptr + head * head_stride + lanes % 4 * 16).to(tl.pointer_type(tl.int32), bitcast=True)
    words = ()
    for chunk in tl.static_range(HEAD_DIM // 64):
        for half in tl.static_range(2):
            at = (first + chunk * 32 + half * 4)[:, None] + tl.arange(0, 4)[None, :]
            words = words + (tl.load(at, mask=(head < GROUP)[:, None], other=0),)
    return words


@triton.jit
def _numbers(word, DTYPE: tl.constexpr):
    """Convert the two 16-bit floats in each word to float32, the low one first."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        low, high = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def digits(loaded, scale_log2e, DTYPE: tl.constexpr, WARPS: tl.constexpr):
    """Quantize the queries from `load_queries` to two 8-bit digits per value.

    Returns: operands of ``mma``; the factor ``[lanes]`` that turns integer products of head t into scores. It is NaN if
    the query has NaN or infinity.
    """
    LANES: tl.constexpr = WARPS * 32
    numbers, largest = (), tl.zeros([LANES], tl.float32)
    for i in tl.static_range(len(loaded)):
        four = columns4(loaded[i], LANES)
        for each in tl.static_range(4):
            low, high = _numbers(four[each], DTYPE)
            numbers = numbers + (low, high)
            largest = tl.maximum(largest, tl.abs(low), propagate_nan=tl.PropagateNan.ALL)
            largest = tl.maximum(largest, tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
    bits = largest.to(tl.int32, bitcast=True)  # as integers, finite numbers sort before infinity before NaN
    bits = tl.reshape(tl.max(tl.reshape(bits, [WARPS, 8, 4]), 2, keep_dims=True).broadcast_to([WARPS, 8, 4]), [LANES])
    largest = bits.to(tl.float32, bitcast=True)
    growth = tl.where((largest > 1e-30) & (largest < 1e30), _Q_LARGEST / largest, 0.0)
    # Digits are signed: adding half the lower digit's range before taking the upper digit rounds it.
    is_higher = tl.arange(0, LANES) % 8 < 4
    whole = tl.where(is_higher, _WHOLE + 128.0, _WHOLE)
    place = tl.where(is_higher, 1, 0)
    words = ()
    for i in tl.static_range(len(numbers) // 4):
        four = ()
        for each in tl.static_range(4):
            four = four + ((numbers[4 * i + each] * growth + whole).to(tl.int32, bitcast=True),)
        words = words + (bytes_at(four[0], four[1], four[2], four[3], place),)
    largest = of_eights(bits, WARPS).to(tl.float32, bitcast=True)
    factor = tl.where(largest > 1e-30, largest * (1 / _Q_LARGEST) * scale_log2e, 0.0)
    return words, tl.where(largest < 1e30, factor, float("nan"))


@triton.jit
def _block_ids(table_ptr, tokens, end, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Load the block ids of each lane's COUNT adjacent tokens. The first token is ``tokens``.

    Tokens after the end get 0, a valid block id.
    """
    ids = ()
    for i in tl.static_range(0, COUNT, min(COUNT, BLOCK_SIZE)):
        ids = ids + (tl.load(table_ptr + (tokens + i) // BLOCK_SIZE, mask=tokens + i < end, other=0),)
    return ids


@triton.jit
def _load_rows(
    words_ptr, ids, tokens, end, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT_WORDS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Load words of COUNT tokens for each lane: of each token, WORDS adjacent words from each of CHUNKS chunks.

    ``words_ptr`` is the address of the lane's first word in block 0. If the lane's first token is after the end, its
    words are arbitrary.
    """
    mask = (tokens < end)[:, None]
    rows = ()
    for i in tl.static_range(COUNT):
        block = ids[i // min(COUNT, BLOCK_SIZE)].to(tl.int64)
        at = words_ptr + block * (BLOCK_SIZE * SLOT_WORDS) + (tokens % BLOCK_SIZE) * SLOT_WORDS
        at += i % min(COUNT, BLOCK_SIZE) * SLOT_WORDS
        for chunk in tl.static_range(CHUNKS):
            columns = (at + chunk * CHUNK_WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
            rows = rows + (tl.load(columns, mask=mask),)
    return rows


@triton.jit
def _load_scales(
    scales_ptr, ids, tokens, end, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Load the scales of each lane's four tokens. ``scales_ptr`` is the address of the kv head's first scale."""
    if BLOCK_SIZE >= 4:
        at = scales_ptr + ids[0].to(tl.int64) * (KV_HEADS * BLOCK_SIZE) + tokens % BLOCK_SIZE
        return columns4(tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=(tokens < end)[:, None]), LANES)
    else:
        scales = ()
        for i in tl.static_range(4):
            at = scales_ptr + ids[i // BLOCK_SIZE].to(tl.int64) * (KV_HEADS * BLOCK_SIZE) + i % BLOCK_SIZE
            scales = scales + (tl.load(at, mask=tokens < end),)
        return scales


@triton.jit
def attend_lanes(
    loaded, scale_log2e, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, begin, start, end,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute attention over tokens ``start … end - 1``, with a running softmax for each warp.

    Args:
        loaded: results of `load_queries`, one for every four heads.
        k_ptr, v_ptr: the layer's caches, as 32-bit words.
        begin: the first token to read, a multiple of 8. Tokens before ``start`` are masked.

    Returns:
        For every four heads: the maxima, and the sum of softmax weights over each lane's tokens. Then, for one group of
            four heads after another, the lane's outputs, not yet divided by that sum.
    """
    LANES: tl.constexpr = WARPS * 32
    TILES: tl.constexpr = len(loaded)
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
    k = _load_rows(k_ptr, k_ids, k_tokens, end, 4, BLOCK_SIZE, SLOT, K_CHUNKS, 16, 4)
    k_scales = _load_scales(k_scales_ptr, k_ids, k_tokens, end, BLOCK_SIZE, KV_HEADS, LANES)
    v_scales = _load_scales(v_scales_ptr, k_ids, k_tokens, end, BLOCK_SIZE, KV_HEADS, LANES)
    v = _load_rows(v_ptr, v_ids, v_tokens, end, 8, BLOCK_SIZE, SLOT, V_CHUNKS, 8 * V_WORDS, V_WORDS)
    k_ids = _block_ids(table_ptr, k_tokens + STEP, end, 4, BLOCK_SIZE)
    v_ids = _block_ids(table_ptr, v_tokens + STEP, end, 8, BLOCK_SIZE)
    # Convert the queries to digits while the first tile loads.
    queries, factors = (), ()
    for tile in tl.static_range(TILES):
        words, factor = digits(loaded[tile], scale_log2e, DTYPE, WARPS)
        queries, factors = queries + (words,), factors + (factor,)
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
                    upper = columns4(k[2 * pair * K_CHUNKS + chunk], LANES)
                    lower = columns4(k[(2 * pair + 1) * K_CHUNKS + chunk], LANES)
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
        k = _load_rows(k_ptr, k_ids, k_tokens + STEP, end, 4, BLOCK_SIZE, SLOT, K_CHUNKS, 16, 4)
        k_scales = _load_scales(k_scales_ptr, k_ids, k_tokens + STEP, end, BLOCK_SIZE, KV_HEADS, LANES)
        v_scales = _load_scales(v_scales_ptr, k_ids, k_tokens + STEP, end, BLOCK_SIZE, KV_HEADS, LANES)
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
                # A NaN among V's scales makes the sum of the weights NaN.
                scale = (now_k_scales[i] + 0.0 * now_v_scales[i]) * factors[tile]
                product = products[8 * tile + 2 * i] * 256 + products[8 * tile + 2 * i + 1]
                score = tl.where(visible[i], tl.cast(product, tl.float32) * scale, float("-inf"))
                scores = scores + (score,)
                largest = tl.maximum(largest, score)
            largest = _over_rows(largest, WARPS)
            anchor = tl.where(largest == float("-inf"), 0.0, largest)  # if the warp has had no visible token
            correction = power(maxima[tile] - anchor)
            total, scaled, most = totals[tile] * correction, (), zeros
            for i in tl.static_range(4):
                weight = power(scores[i] - anchor)
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
                (
                    transpose8x8(two_digits(whole[0], whole[1]), WARPS),
                    transpose8x8(two_digits(whole[2], whole[3]), WARPS),
                ),
            )
            new_maxima, new_totals = new_maxima + (largest,), new_totals + (total,)
            corrections, growths = corrections + (correction,), growths + (most * (1 / _WEIGHT_LARGEST),)
        maxima, totals = new_maxima, new_totals
        new_outs = ()
        for word in tl.static_range(V_CHUNKS * V_WORDS):
            rows = ()
            for i in tl.static_range(8):
                rows = rows + (_columns(v[i * V_CHUNKS + word // V_WORDS], LANES, V_WORDS)[word % V_WORDS],)
            # Weights are in pairs of tokens: 8t, 8t + 1, 8t + 4, 8t + 5 in the first word, the others in the second.
            first = transpose4x4_bytes(rows[0], rows[1], rows[4], rows[5])
            second = transpose4x4_bytes(rows[2], rows[3], rows[6], rows[7])
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
        v = _load_rows(v_ptr, v_ids, v_tokens + STEP, end, 8, BLOCK_SIZE, SLOT, V_CHUNKS, 8 * V_WORDS, V_WORDS)
        v_ids = _block_ids(table_ptr, v_tokens + 2 * STEP, end, 8, BLOCK_SIZE)
    return maxima, totals, outs


@triton.jit
def merge_warps(maximum, total, numbers, WARPS: tl.constexpr):
    """Merge the results of all warps of `attend_lanes`, for four heads.

    Returns:
        Maximum and sum, ``[32]``, and outputs divided by the sum, ``[32, HEAD_DIM / 8]``: lane 4r + t has head t.
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
    """Store the outputs of tile TILE's four heads, and, if ``lse_ptr`` is given, their log-sum-exps in base 2.

    Both pointers are addresses of the group's first head.
    """
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
def load_group(
    q_ptr, head_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Call `load_queries` for every four heads of a kv head's group.

    ``q_ptr`` points to the group's first query head.
    """
    loaded = ()
    for tile in tl.static_range((GROUP + HEADS - 1) // HEADS):
        loaded = loaded + (load_queries(q_ptr, head_stride, tile, GROUP, HEAD_DIM, WARPS),)
    return loaded


@triton.jit
def attend_group(
    out_ptr, lse_ptr, loaded, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, out_head_stride,
    scale_log2e, kv_head, start, end,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Compute attention of a kv head's query heads over tokens ``start … end - 1``, and store the outputs.

    Also store log-sum-exps in base 2 if ``lse_ptr`` is given. ``loaded`` are the queries from `load_group`, of dtype
    DTYPE; ``out_ptr`` and ``lse_ptr`` are addresses of the group's first head.
    """
    NUMBERS: tl.constexpr = HEAD_DIM // 8
    maxima, totals, outs = attend_lanes(
        loaded, scale_log2e, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, start // 8 * 8, start, end,
        DTYPE, HEAD_DIM, BLOCK_SIZE, KV_HEADS, WARPS,
    )  # fmt: skip
    for tile in tl.static_range(len(loaded)):
        maximum, divisor, out = merge_warps(
            maxima[tile], totals[tile], outs[tile * NUMBERS : (tile + 1) * NUMBERS], WARPS
        )  # fmt: skip
        store_heads(out_ptr, lse_ptr, out_head_stride, maximum, divisor, out, tile, GROUP, HEAD_DIM)


def takes(q: Tensor, pages: Pages) -> bool:
    """Return whether these kernels support this cache, these queries and this GPU.

    The requirements are: an 8-bit cache, 16-bit queries with even strides, heads of 64 or 128, at most 8 query heads
    per kv head, and a GPU with int8 tensor cores (compute capability 8.0).
    """
    head_dim, group = q.shape[2], q.shape[1] // pages.k.shape[2]
    fits = pages.k_scales is not None and q.element_size() == 2 and head_dim in (64, 128) and group <= 8
    fits = fits and q.data_ptr() % 4 == 0 and q.stride(0) % 2 == 0 and q.stride(1) % 2 == 0  # loaded as words
    return fits and has_int8_mma(q.device)


def registers(group: int) -> int:
    """Return the register limit per thread for ``group`` query heads per kv head.

    With this limit, four programs of four warps fit on a multiprocessor, or three if the group needs two tiles of four
    heads. Without a limit, the compiler uses a few more registers, or, for small heads, too few to issue loads early.
    """
    return 128 if group <= HEADS.value else 168
