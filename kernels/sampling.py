"""One token per row from logits, without sorting them.

top-k, top-p and min-p each keep the upper part of a row in one order (larger logit first, lower id among equals), so
what is kept is *everything down to some token*: a cut is a logit and an id. The draw is Gumbel-max (Gumbel 1954): the
kept token with the largest ``logit / temperature + noise``, where noise is a hash of (seed, position, token id), so that
a sequence draws the same whatever else is in the batch.

Two launches:

1. ``_scan_kernel``, grid (rows, pieces of the vocabulary): one pass at memory speed. For each piece it keeps the largest
   logit with its id, the sum of ``exp`` at temperature 1 (for log-probabilities) and at the row's own, the best logit
   plus noise (which is the draw, where nothing is cut), and the maximum of every 64 neighbours.
2. ``_draw_kernel``, grid (rows): merges the pieces. Where something is cut it collects candidates: if the n-th largest
   of the 64-maxima is t, at least n logits are >= t, and usually few more. Bisection over the ordered bits of a float
   finds t among the maxima on chip; groups that reach t are read again and the logits >= t written next to each other.
   The cuts are bisections over those, by count and by mass. Where the candidates cannot decide (a flat distribution
   with top-p near 1, thousands of equal logits), the same bisections run over the whole row: slower, and exact.

Bytes: the logits once, 4 * rows * vocab, at memory speed; what the second kernel reads comes from L2.

References: `kernels.reference.sample`, `kernels.reference.log_probabilities`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096  # logits per program of the scan
_GROUP = 64  # neighbours that share one maximum
_CANDIDATES = 1024  # logits that the second kernel can hold on chip
_LEAST_CANDIDATES = 256  # collected where no top-k says how many are enough
_PARTS = 6  # values per piece: maximum, its id, exp-sum at 1, exp-sum at the temperature, best score, its id


@triton.jit
def _mix64(x):
    """SplitMix64's finaliser; see `reference._mix64`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, ids):
    """The noise of `reference.gumbel` for one row's (seed, position) and a tile of token ids."""
    key = _mix64(_mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64))
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32) * 0x9E3779B9 + low
    x = _mix32(x, 0x21F0AAAD, 0xD35A2D97) ^ high
    x = _mix32(x, 0x7FEB352D, 0x846CA68B) & 0x7FFFFFFF
    uniform = (x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.99999994)
    # log1p(-u), exact enough where u is small and matters: log(1 - u) * u / (1 - (1 - u)) corrects the rounding of 1 - u.
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit
def _ordered(x):
    """An int32 that orders like the float: what bisection halves."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scan_kernel(
    parts_ptr, maxima_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab, num_pieces, num_groups,
    PIECE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf"))
    maximum, where = tl.max(x, axis=0, return_indices=True)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    temperature = tl.load(temperature_ptr + row)
    drawn = temperature > 0
    scale = tl.where(drawn, temperature, 1.0)
    out = parts_ptr + (row * num_pieces + piece) * PARTS
    tl.store(out, maximum)
    tl.store(out + 1, (piece * PIECE + where).to(tl.float32))
    tl.store(out + 2, tl.sum(tl.exp(x - anchor), axis=0))
    tl.store(out + 3, tl.sum(tl.exp((x - anchor) / scale), axis=0))
    truncated = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)
    if drawn and not truncated:
        score = (x - anchor) / scale + _gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
        best, where = tl.max(score, axis=0, return_indices=True)
        tl.store(out + 4, best)
        tl.store(out + 5, (piece * PIECE + where).to(tl.float32))
    if drawn and truncated:
        groups = piece * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP)
        group_maxima = tl.max(tl.reshape(x, [PIECE // GROUP, GROUP]), axis=1)
        tl.store(maxima_ptr + row * num_groups + groups, group_maxima, mask=groups < num_groups)


@triton.jit
def _nth_largest(keys, n, low, high):
    """The largest key that at least ``n`` of ``keys`` reach, known to lie in ``low … high``."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= n:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _mass_reaches(keys, weights, wanted, low, high):
    """The largest key such that the weights of the keys that reach it sum to ``wanted`` or more."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), axis=0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _row_totals(row_ptr, vocab, key, anchor, scale, TILE: tl.constexpr):
    """(how many of a row's logits reach ``key``, the sum of their weights), over the whole row."""
    count = 0
    mass = 0.0
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        reached = (_ordered(x) >= key) & (ids < vocab)
        count += tl.sum(reached.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(reached, tl.exp((x - anchor) / scale), 0.0), axis=0)
    return count, mass


@triton.jit
def _row_cut(row_ptr, vocab, anchor, scale, top_k, top_p, total, low, high, TILE: tl.constexpr):
    """The cut of top-k, then top-p, by bisections over the whole row: (key, how many logits equal to it are kept)."""
    cut_key = low
    kept_equal = vocab
    if top_k > 0:
        lower, upper = low.to(tl.int64), high.to(tl.int64)
        while lower < upper:
            middle = (lower + upper + 1) >> 1
            count, _mass = _row_totals(row_ptr, vocab, middle.to(tl.int32), anchor, scale, TILE)
            if count >= top_k:
                lower = middle
            else:
                upper = middle - 1
        cut_key = lower.to(tl.int32)
        above, mass_above = _row_totals(row_ptr, vocab, (lower + 1).to(tl.int32), anchor, scale, TILE)
        kept_equal = (top_k - above).to(tl.int32)
        total = mass_above + kept_equal * tl.exp((_unordered(cut_key) - anchor) / scale)
    if top_p < 1.0:
        wanted = top_p * total
        lower, upper = cut_key.to(tl.int64), high.to(tl.int64)
        while lower < upper:
            middle = (lower + upper + 1) >> 1
            _count, mass = _row_totals(row_ptr, vocab, middle.to(tl.int32), anchor, scale, TILE)
            if mass >= wanted:
                lower = middle
            else:
                upper = middle - 1
        if lower > cut_key:
            kept_equal = vocab
        cut_key = lower.to(tl.int32)
        _count, mass_above = _row_totals(row_ptr, vocab, (lower + 1).to(tl.int32), anchor, scale, TILE)
        kept_equal = _kept_among_equals(wanted - mass_above, cut_key, anchor, scale, kept_equal)
    return cut_key, kept_equal


@triton.jit
def _kept_among_equals(missing, cut_key, anchor, scale, limit):
    """How many logits equal to the cut it takes to fill ``missing`` mass: at least one, at most ``limit``."""
    weight = tl.exp((_unordered(cut_key) - anchor) / scale)
    needed = tl.ceil(missing / tl.maximum(weight, 1e-37))
    return tl.minimum(tl.maximum(needed, 1.0), limit.to(tl.float32)).to(tl.int32)


@triton.jit
def _row_draw(
    row_ptr, vocab, anchor, scale, cut_key, kept_equal, least, seed, position, TILE: tl.constexpr
):  # fmt: skip
    """The draw over the whole row, once the cut is known."""
    best = float("-inf")
    token = 0
    equals_before = 0
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        valid = ids < vocab
        x = tl.load(row_ptr + ids, mask=valid, other=float("-inf"))
        keys = _ordered(x)
        equal = valid & (keys == cut_key)
        number = equals_before + tl.cumsum(equal.to(tl.int32), axis=0)
        scaled = (x - anchor) / scale
        kept = valid & ((keys > cut_key) | (equal & (number <= kept_equal))) & (scaled >= least)
        score = tl.where(kept, scaled + _gumbel(seed, position, ids), float("-inf"))
        tile_best, where = tl.max(score, axis=0, return_indices=True)
        if tile_best > best:
            best = tile_best
            token = start + where
        equals_before += tl.sum(equal.to(tl.int32), axis=0)
    return token


@triton.jit
def _draw_kernel(
    tokens_ptr, logprobs_ptr,
    groups_ptr, values_ptr, ids_ptr, parts_ptr, maxima_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab, num_pieces, num_groups,
    PIECES_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, LEAST_CANDIDATES: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    pieces = tl.arange(0, PIECES_TILE)
    is_piece = pieces < num_pieces
    part_ptr = parts_ptr + (row * num_pieces + pieces) * PARTS
    piece_maxima = tl.load(part_ptr, mask=is_piece, other=float("-inf"))
    piece_ids = tl.load(part_ptr + 1, mask=is_piece, other=0.0).to(tl.int32)
    maximum = tl.max(piece_maxima, axis=0)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    temperature = tl.load(temperature_ptr + row)
    drawn = temperature > 0
    scale = tl.where(drawn, temperature, 1.0)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    truncated = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    top_k = tl.minimum(top_k, vocab)
    token = tl.min(tl.where(is_piece & (piece_maxima == maximum), piece_ids, vocab - 1), axis=0)
    if drawn and not truncated:
        piece_anchors = tl.where(piece_maxima == float("-inf"), 0.0, piece_maxima)
        scores = tl.load(part_ptr + 4, mask=is_piece, other=float("-inf")) + (piece_anchors - anchor) / scale
        scores = tl.where(is_piece, scores, float("-inf"))
        score_ids = tl.load(part_ptr + 5, mask=is_piece, other=0.0).to(tl.int32)
        token = tl.min(tl.where(is_piece & (scores == tl.max(scores, axis=0)), score_ids, vocab - 1), axis=0)
    if drawn and truncated:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        sums = tl.load(part_ptr + 3, mask=is_piece, other=0.0)
        total = tl.sum(sums * tl.exp((tl.where(is_piece, piece_maxima, anchor) - anchor) / scale), axis=0)
        least = tl.log(min_p)
        high = _ordered(maximum)
        floor = _ordered(maximum * 0.0 - float("inf"))

        # Groups of neighbours whose maximum reaches the n-th largest one, then the logits in them that do.
        groups = tl.arange(0, GROUPS_TILE)
        group_keys = _ordered(
            tl.load(maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
        )
        enough = tl.minimum(tl.where(top_k > 0, top_k, LEAST_CANDIDATES), num_groups)
        threshold = _nth_largest(group_keys, enough, floor, high)
        active = (groups < num_groups) & (group_keys >= threshold)
        num_active = tl.sum(active.to(tl.int32), axis=0)
        tl.store(
            groups_ptr + row * GROUPS_TILE + tl.cumsum(active.to(tl.int32), axis=0) - 1, groups, mask=active
        )
        tl.debug_barrier()
        found = 0
        flat = tl.arange(0, CANDIDATES)
        for start in range(0, num_active * GROUP, CANDIDATES):
            number = (start + flat) // GROUP
            valid = number < num_active
            ids = tl.load(groups_ptr + row * GROUPS_TILE + number, mask=valid, other=0) * GROUP + flat % GROUP
            valid = valid & (ids < vocab)
            x = tl.load(row_ptr + ids, mask=valid, other=float("-inf"))
            reached = valid & (_ordered(x) >= threshold)
            place = found + tl.cumsum(reached.to(tl.int32), axis=0) - 1
            fits = reached & (place < CANDIDATES)
            tl.store(values_ptr + row * CANDIDATES + place, x, mask=fits)
            tl.store(ids_ptr + row * CANDIDATES + place, ids, mask=fits)
            found += tl.sum(reached.to(tl.int32), axis=0)
        tl.debug_barrier()

        held = flat < found
        x = tl.load(values_ptr + row * CANDIDATES + flat, mask=held, other=float("-inf"))
        ids = tl.load(ids_ptr + row * CANDIDATES + flat, mask=held, other=0)
        keys = tl.where(held, _ordered(x), floor)
        scaled = (x - anchor) / scale
        weights = tl.where(held, tl.exp(scaled), 0.0)
        decided = (top_k > 0) & (top_k <= enough)
        decided = decided | ((top_k == 0) & (top_p < 1.0) & (tl.sum(weights, axis=0) >= top_p * total))
        decided = decided | ((top_k == 0) & ((_unordered(threshold) - anchor) / scale <= least) & (top_p >= 1.0))
        if decided & (found <= CANDIDATES):
            cut_key = floor
            kept_equal = vocab
            if top_k > 0:
                cut_key = _nth_largest(keys, top_k, threshold, high)
                kept_equal = top_k - tl.sum((keys > cut_key).to(tl.int32), axis=0)
                mass_above = tl.sum(tl.where(keys > cut_key, weights, 0.0), axis=0)
                total = mass_above + kept_equal * tl.exp((_unordered(cut_key) - anchor) / scale)
            if top_p < 1.0:
                wanted = top_p * total
                mass_key = _mass_reaches(keys, weights, wanted, tl.maximum(cut_key, threshold), high)
                mass_above = tl.sum(tl.where(keys > mass_key, weights, 0.0), axis=0)
                limit = tl.where(mass_key > cut_key, vocab, kept_equal)
                kept_equal = _kept_among_equals(wanted - mass_above, mass_key, anchor, scale, limit)
                cut_key = mass_key
            equal = held & (keys == cut_key)
            kept = held & ((keys > cut_key) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= kept_equal)))
            kept = kept & (scaled >= least)
            scores = tl.where(kept, scaled + _gumbel(seed, position, ids), float("-inf"))
            token = tl.min(tl.where(kept & (scores == tl.max(scores, axis=0)), ids, vocab - 1), axis=0)
        else:
            cut_key, kept_equal = _row_cut(
                row_ptr, vocab, anchor, scale, top_k, top_p, total, floor, high, ROW_TILE
            )
            token = _row_draw(
                row_ptr, vocab, anchor, scale, cut_key, kept_equal, least, seed, position, ROW_TILE
            )
    tl.store(tokens_ptr + row, token.to(tl.int64))
    sums = tl.load(part_ptr + 2, mask=is_piece, other=0.0)
    total = tl.sum(sums * tl.exp(tl.where(is_piece, piece_maxima, anchor) - anchor), axis=0)
    tl.store(logprobs_ptr + row, tl.load(row_ptr + token) - (anchor + tl.log(total)))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: see `reference.sample`.

    Args:
        logits: ``[rows, vocab]`` float32, rows may be strided; vocab below 2^24.
        temperature, top_p, min_p: ``[rows]`` float32. top_k, seeds, positions: ``[rows]`` int64.

    Returns:
        ``(token_ids [rows] int64, log_probabilities [rows] float32)``; the latter are the logits' own, at temperature 1.

    Raises:
        ValueError: wrong shape or layout.
    """
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or vocab >= 1 << 24:
        raise ValueError(f"sample takes float32 logits with contiguous rows, not {logits.dtype} {tuple(logits.shape)}")
    for name, tensor in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if tensor.shape != (rows,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous [{rows}], not {tuple(tensor.shape)}")
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return tokens, logprobs
    num_pieces, num_groups = triton.cdiv(vocab, _PIECE), triton.cdiv(vocab, _GROUP)
    groups_tile = triton.next_power_of_2(num_groups)
    parts = torch.empty(rows, num_pieces, _PARTS, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    group_ids = torch.empty(rows, groups_tile, dtype=torch.int32, device=device)
    values = torch.empty(rows, _CANDIDATES, dtype=torch.float32, device=device)
    ids = torch.empty(rows, _CANDIDATES, dtype=torch.int32, device=device)
    _scan_kernel[(rows, num_pieces)](
        parts, maxima,
        logits, temperature, top_k, top_p, min_p, seeds, positions,
        logits.stride(0), vocab, num_pieces, num_groups,
        PIECE=_PIECE, GROUP=_GROUP, PARTS=_PARTS,
        num_warps=8,
    )  # fmt: skip
    _draw_kernel[(rows,)](
        tokens, logprobs,
        group_ids, values, ids, parts, maxima,
        logits, temperature, top_k, top_p, min_p, seeds, positions,
        logits.stride(0), vocab, num_pieces, num_groups,
        PIECES_TILE=triton.next_power_of_2(num_pieces), GROUPS_TILE=groups_tile, GROUP=_GROUP, PARTS=_PARTS,
        CANDIDATES=_CANDIDATES, LEAST_CANDIDATES=_LEAST_CANDIDATES, ROW_TILE=_PIECE,
        num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
