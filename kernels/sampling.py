"""One token per row from logits, without sorting them.

top-k, top-p and min-p each keep the upper part of a row in one order (larger logit first, lower id among equals), so
what is kept is *everything down to some token*: a cut is a logit and an id. The draw is Gumbel-max (Gumbel 1954): the
kept token with the largest ``logit / temperature + noise``, where noise is a hash of (seed, position, token id): a
sequence draws the same whatever else is in the batch. With E = -log(1 - uniform), that is the token with the largest
``exp(logit / temperature) / E``, which saves a logarithm per token.

Two launches:

1. ``_scan_kernel``, grid (rows, pieces of the vocabulary): one pass at memory speed. Of each piece it keeps the largest
   logit with its id, the sum of ``exp`` at temperature 1 (for log-probabilities) and at the row's own, the best score,
   and the maximum of every 32 neighbours.
2. ``_draw_kernel``, grid (rows): merges the pieces. What it does then depends on the row:
   - nothing cut: the best score of all pieces is the draw.
   - top-k: if the k-th largest of the neighbours' maxima is t, at least k logits are >= t, and usually few more. Those
     are collected on chip, and cut there by count and by mass, each by bisection over the ordered bits of a float.
   - no top-k: the best score is the draw if the mass above its token is small enough. If it is not, every token up to
     that one is cut as well, and the best of the rest is tried: the same draw as after a search for the cut, which
     takes about one pass (rejection with a rising pivot, as in FlashInfer's sampler, on fixed noise).
   - top-k too large, or too many equal logits: bisections over the whole row. Slower, and exact.

Bytes: the logits once, at memory speed; what the second kernel reads comes from L2.

References: `minillm.kernels.reference.sample`, `minillm.kernels.reference.log_probabilities`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.compat import pdl_options, wait_for_inputs

_PIECE = 4096  # logits per program of the scan
_GROUP = 32  # neighbours that share one maximum
_CANDIDATES = 2048  # logits that the second kernel can hold on chip
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
def _exponential(seed, position, ids):
    """-log(1 - u) for the uniforms of `reference.uniform`: one row's (seed, position), a tile of token ids."""
    key = _mix64(_mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64))
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32) * 0x9E3779B9 + low
    x = _mix32(x, 0x21F0AAAD, 0xD35A2D97) ^ high
    x = _mix32(x, 0x7FEB352D, 0x846CA68B) & 0x7FFFFFFF
    uniform = (x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.99999994)
    # 1 - u is rounded; where u is small, which is where the draw is decided, the series is exact.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    return tl.where(uniform < 0.004, series, -tl.log(1.0 - uniform))


@triton.jit
def _ordered(x):
    """An int32 that orders like the float: what bisection halves. Both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _scan_kernel(
    parts_ptr, maxima_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab, num_pieces, num_groups,
    PIECE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    maximum, where = tl.max(x, axis=0, return_indices=True)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    temperature = tl.load(temperature_ptr + row)
    out = parts_ptr + (row * num_pieces + piece) * PARTS
    tl.store(out, maximum)
    tl.store(out + 1, (piece * PIECE + where).to(tl.float32))
    tl.store(out + 2, tl.sum(tl.exp(x - anchor), axis=0))
    if temperature > 0:
        weights = tl.exp((x - anchor) / temperature)
        tl.store(out + 3, tl.sum(weights, axis=0))
        if tl.load(top_k_ptr + row) > 0:
            groups = piece * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP)
            group_maxima = tl.max(tl.reshape(x, [PIECE // GROUP, GROUP]), axis=1)
            tl.store(maxima_ptr + row * num_groups + groups, group_maxima, mask=groups < num_groups)
        else:
            scores = weights / _exponential(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
            # min-p is a cut that needs the whole row's maximum; it is made when the pieces are merged.
            best, where = tl.max(scores, axis=0, return_indices=True)
            tl.store(out + 4, best)
            tl.store(out + 5, (piece * PIECE + where).to(tl.float32))


@triton.jit
def _nth_largest(keys, n, low, high):
    """A key that the ``n`` largest of ``keys`` reach and, but for equals, no others; it lies in ``low … high``."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        if count >= n:
            low = middle
        else:
            high = middle - 1
        if count == n:  # it separates them already
            high = low
    return low.to(tl.int32)


@triton.jit
def _is_above(keys, ids, key, token):
    """Which (key, id) come before ``(key, token)``: larger, or equal with a lower id."""
    return (keys > key) | ((keys == key) & (ids < token))


@triton.jit
def _row_above(row_ptr, vocab, key, token, anchor, temperature, TILE: tl.constexpr):
    """(count, mass) of a row's tokens above ``(key, token)``, over the whole row."""
    counts = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=3):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        above = (ids < vocab) & _is_above(_ordered(x), ids, key, token)
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp((x - anchor) / temperature), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _row_best(row_ptr, vocab, key, token, least, anchor, temperature, seed, position, TILE: tl.constexpr):
    """The token of the best score among those above ``(key, token)`` that min-p keeps, over the whole row."""
    best = tl.full([TILE], -1.0, tl.float32)
    best_ids = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=3):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        scaled = (x - anchor) / temperature
        kept = (ids < vocab) & _is_above(_ordered(x), ids, key, token) & (scaled >= least)
        scores = tl.where(kept, tl.exp(scaled) / _exponential(seed, position, ids), -1.0)
        better = scores > best
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_ids, vocab - 1), axis=0)


@triton.jit
def _row_top_k(row_ptr, vocab, top_k, low, high, TILE: tl.constexpr):
    """The ``(key, id)`` that exactly ``top_k`` tokens come before, by bisections over the whole row."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count, _mass = _row_above(row_ptr, vocab, middle.to(tl.int32), vocab, 0.0, 1.0, TILE)
        if count >= top_k:
            low = middle
        else:
            high = middle - 1
        if count == top_k:
            high = low
    key = low.to(tl.int32)
    # Among the logits equal to the cut, those with the lowest ids stay.
    first, last = 0, vocab
    while first < last:
        middle = (first + last) // 2
        count, _mass = _row_above(row_ptr, vocab, key, middle, 0.0, 1.0, TILE)
        if count >= top_k:
            last = middle
        else:
            first = middle + 1
    return key, first


@triton.jit
def _collect(
    row, row_ptr, maxima_ptr, groups_ptr, values_ptr, ids_ptr, vocab, num_groups, n, high,
    GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the logits that reach a threshold, at least ``n`` of them, and their ids next to each other, by id.

    The threshold is the n-th largest of the groups' maxima. Returns (it, how many there are); those beyond
    ``CANDIDATES`` are not written.
    """
    groups = tl.arange(0, GROUPS_TILE)
    is_group = groups < num_groups
    keys = _ordered(tl.load(maxima_ptr + row * num_groups + groups, mask=is_group, other=float("-inf")))
    lowest = tl.min(tl.where(is_group, keys, high), axis=0)
    threshold = _nth_largest(keys, tl.minimum(n, num_groups), lowest, high)
    active = is_group & (keys >= threshold)
    places = tl.cumsum(active.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + row * GROUPS_TILE + places, groups, mask=active)
    num_active = tl.sum(active.to(tl.int32), axis=0)
    tl.debug_barrier()  # the program reads what its other threads have written
    found = 0
    flat = tl.arange(0, CANDIDATES)
    for start in range(0, num_active * GROUP, CANDIDATES):
        number = (start + flat) // GROUP
        group = tl.load(groups_ptr + row * GROUPS_TILE + number, mask=number < num_active, other=0)
        ids = group * GROUP + flat % GROUP
        valid = (number < num_active) & (ids < vocab)
        x = tl.load(row_ptr + ids, mask=valid, other=float("-inf")).to(tl.float32)
        reached = valid & (_ordered(x) >= threshold)
        place = found + tl.cumsum(reached.to(tl.int32), axis=0) - 1
        fits = reached & (place < CANDIDATES)
        tl.store(values_ptr + row * CANDIDATES + place, x, mask=fits)
        tl.store(ids_ptr + row * CANDIDATES + place, ids, mask=fits)
        found += tl.sum(reached.to(tl.int32), axis=0)
    tl.debug_barrier()
    return threshold, found


@triton.jit
def _keep_top(keys, held, n, threshold, low, high):
    """Exactly ``n`` of the held candidates, which stand in order of id: the largest, lower ids first among equals."""
    cut = _nth_largest(tl.where(held, keys, low), n, threshold, high)
    equal = held & (keys == cut)
    missing = n - tl.sum((held & (keys > cut)).to(tl.int32), axis=0)
    return held & ((keys > cut) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing)))


@triton.jit
def _draw_kernel(
    tokens_ptr, logprobs_ptr,
    groups_ptr, values_ptr, ids_ptr, parts_ptr, maxima_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab, num_pieces, num_groups,
    PIECES_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, ROW_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    pieces = tl.arange(0, PIECES_TILE)
    is_piece = pieces < num_pieces
    part_ptr = parts_ptr + (row * num_pieces + pieces) * PARTS
    piece_maxima = tl.load(part_ptr, mask=is_piece, other=float("-inf"))
    piece_ids = tl.load(part_ptr + 1, mask=is_piece, other=0.0).to(tl.int32)
    sums = tl.load(part_ptr + 2, mask=is_piece, other=0.0)
    maximum = tl.max(piece_maxima, axis=0)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    temperature = tl.load(temperature_ptr + row)
    token = tl.min(tl.where(is_piece & (piece_maxima == maximum), piece_ids, vocab - 1), axis=0)
    total_at_one = tl.sum(sums * tl.exp(tl.where(is_piece, piece_maxima, float("-inf")) - anchor), axis=0)
    # A row with NaN has no order, and a search for a cut in it might never end. Its log-probability is NaN.
    if (temperature > 0) & (total_at_one == total_at_one):
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab).to(tl.int32)
        top_p = tl.load(top_p_ptr + row)
        least = tl.log(tl.load(min_p_ptr + row))
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        high = _ordered(maximum)
        low = _ordered(maximum * 0.0 - float("inf"))
        drawn = 0
        total = 0.0
        if top_k == 0:
            piece_weights = tl.exp((tl.where(is_piece, piece_maxima, float("-inf")) - anchor) / temperature)
            total = tl.sum(tl.load(part_ptr + 3, mask=is_piece, other=0.0) * piece_weights, axis=0)
            scores = tl.load(part_ptr + 4, mask=is_piece, other=0.0) * piece_weights
            scores = tl.where(is_piece, scores, -1.0)
            score_ids = tl.load(part_ptr + 5, mask=is_piece, other=0.0).to(tl.int32)
            token = tl.min(tl.where(scores == tl.max(scores, axis=0), score_ids, vocab - 1), axis=0)
        else:
            threshold, found = _collect(
                row, row_ptr, maxima_ptr, groups_ptr, values_ptr, ids_ptr, vocab, num_groups, top_k, high,
                GROUPS_TILE, GROUP, CANDIDATES,
            )  # fmt: skip
            flat = tl.arange(0, CANDIDATES)
            if (found <= CANDIDATES) & (top_k <= num_groups):
                drawn = 1
                held = flat < found
                x = tl.load(values_ptr + row * CANDIDATES + flat, mask=held, other=float("-inf"))
                ids = tl.load(ids_ptr + row * CANDIDATES + flat, mask=held, other=vocab)
                keys = _ordered(x)
                kept = _keep_top(keys, held, top_k, threshold, low, high)
                scaled = (x - anchor) / temperature
                weights = tl.where(kept, tl.exp(scaled), 0.0)
                total = tl.sum(weights, axis=0)
                scores = weights / _exponential(seed, position, ids)
                scores = tl.where(kept & (scaled >= least), scores, -1.0)
                accepted = 0
                while accepted == 0:
                    token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, vocab), axis=0)
                    key = tl.max(tl.where(ids == token, keys, low), axis=0)
                    above = _is_above(keys, ids, key, token)
                    if (top_p >= 1.0) | (tl.sum(tl.where(above, weights, 0.0), axis=0) < top_p * total):
                        accepted = 1
                    elif tl.sum((above & kept).to(tl.int32), axis=0) == 0:
                        accepted = 1  # the most probable token is always kept
                    scores = tl.where(above, scores, -1.0)
            else:
                key, limit = _row_top_k(row_ptr, vocab, top_k, low, high, ROW_TILE)
                _count, total = _row_above(row_ptr, vocab, key, limit, anchor, temperature, ROW_TILE)
                token = _row_best(row_ptr, vocab, key, limit, least, anchor, temperature, seed, position, ROW_TILE)
        while drawn == 0:
            x = tl.load(row_ptr + token).to(tl.float32)
            key = _ordered(x)
            enough = (x - anchor) / temperature >= least
            if enough & (top_p >= 1.0):
                drawn = 1
            else:
                count, mass = _row_above(row_ptr, vocab, key, token, anchor, temperature, ROW_TILE)
                if (count == 0) | (enough & (mass < top_p * total)):
                    drawn = 1
                else:
                    token = _row_best(row_ptr, vocab, key, token, least, anchor, temperature, seed, position, ROW_TILE)
    token = tl.minimum(token, vocab - 1)  # of a row of NaN nothing is the largest
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.load(row_ptr + token).to(tl.float32) - (anchor + tl.log(total_at_one)))


@triton.jit
def _top_kernel(
    out_logprobs_ptr, out_ids_ptr,
    groups_ptr, values_ptr, ids_ptr, parts_ptr, maxima_ptr, logits_ptr,
    row_stride, vocab, num_pieces, num_groups, count,
    PIECES_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, COUNT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The ``count`` largest logits of a row in order, as log-probabilities."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    pieces = tl.arange(0, PIECES_TILE)
    is_piece = pieces < num_pieces
    part_ptr = parts_ptr + (row * num_pieces + pieces) * PARTS
    piece_maxima = tl.load(part_ptr, mask=is_piece, other=float("-inf"))
    sums = tl.load(part_ptr + 2, mask=is_piece, other=0.0)
    maximum = tl.max(piece_maxima, axis=0)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    log_total = anchor + tl.log(tl.sum(sums * tl.exp(piece_maxima - anchor), axis=0))
    high = _ordered(maximum)
    low = _ordered(maximum * 0.0 - float("inf"))
    threshold, found = _collect(
        row, row_ptr, maxima_ptr, groups_ptr, values_ptr, ids_ptr, vocab, num_groups, count, high,
        GROUPS_TILE, GROUP, CANDIDATES,
    )  # fmt: skip
    if (found > CANDIDATES) | (count > num_groups):
        # Too many candidates: write exactly the wanted ones over them.
        key, limit = _row_top_k(row_ptr, vocab, count, low, high, ROW_TILE)
        found = 0
        for start in range(0, vocab, ROW_TILE):
            ids = start + tl.arange(0, ROW_TILE)
            x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            kept = (ids < vocab) & _is_above(_ordered(x), ids, key, limit)
            places = found + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(values_ptr + row * CANDIDATES + places, x, mask=kept)
            tl.store(ids_ptr + row * CANDIDATES + places, ids, mask=kept)
            found += tl.sum(kept.to(tl.int32), axis=0)
        threshold = low
        tl.debug_barrier()
    flat = tl.arange(0, CANDIDATES)
    held = flat < found
    x = tl.load(values_ptr + row * CANDIDATES + flat, mask=held, other=float("-inf"))
    ids = tl.load(ids_ptr + row * CANDIDATES + flat, mask=held, other=vocab)
    kept = _keep_top(_ordered(x), held, count, threshold, low, high)
    places = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # everyone has read the candidates before they are overwritten
    tl.store(values_ptr + row * CANDIDATES + places, x, mask=kept)
    tl.store(ids_ptr + row * CANDIDATES + places, ids, mask=kept)
    tl.debug_barrier()
    slots = tl.arange(0, COUNT_TILE)
    x = tl.load(values_ptr + row * CANDIDATES + slots, mask=slots < count, other=float("-inf"))
    ids = tl.load(ids_ptr + row * CANDIDATES + slots, mask=slots < count, other=vocab)
    # Few enough to rank each against each; candidates stand in order of id, so equals keep their order.
    before = (x[:, None] > x[None, :]) | ((x[:, None] == x[None, :]) & (ids[:, None] < ids[None, :]))
    rank = tl.sum(before.to(tl.int32), axis=0)
    tl.store(out_logprobs_ptr + row * count + rank, x - log_total, mask=slots < count)
    tl.store(out_ids_ptr + row * count + rank, ids.to(tl.int64), mask=slots < count)


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
        logits: ``[rows, vocab]`` float32, bfloat16 or float16, rows may be strided; vocab below 2^24.
        temperature, top_p, min_p: ``[rows]`` float32. top_k, seeds, positions: ``[rows]`` int64.

    Returns:
        ``(token_ids [rows] int64, log_probabilities [rows] float32)``; the latter are the model's own, untempered.

    Raises:
        ValueError: wrong shape or layout.
    """
    rows, vocab = _check_logits(logits)
    for name, tensor in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if tensor.shape != (rows,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous [{rows}], not {tuple(tensor.shape)}")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        scratch = _scan(logits, temperature, top_k, seeds, positions)
        _draw_kernel[(rows,)](
            tokens, logprobs,
            *scratch.tensors,
            logits, temperature, top_k, top_p, min_p, seeds, positions,
            logits.stride(0), vocab, scratch.num_pieces, scratch.num_groups,
            **scratch.tiles, ROW_TILE=_PIECE,
            num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip
    return tokens, logprobs


def top_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` most probable tokens of each row: see `reference.top_log_probabilities`.

    Args:
        logits: ``[rows, vocab]`` float32, bfloat16 or float16, rows may be strided; vocab below 2^24.
        count: 1 to 256, at most vocab.

    Raises:
        ValueError: wrong shape, layout or count.
    """
    rows, vocab = _check_logits(logits)
    if not 1 <= count <= min(256, vocab):
        raise ValueError(f"count must be from 1 to {min(256, vocab)}, not {count}")
    device = logits.device
    logprobs = torch.empty(rows, count, dtype=torch.float32, device=device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        ones = torch.ones(rows, dtype=torch.float32, device=device)
        counts = torch.full((rows,), count, dtype=torch.int64, device=device)
        scratch = _scan(logits, ones, counts, counts, counts)
        _top_kernel[(rows,)](
            logprobs, ids,
            *scratch.tensors, logits,
            logits.stride(0), vocab, scratch.num_pieces, scratch.num_groups, count,
            **scratch.tiles, COUNT_TILE=max(16, triton.next_power_of_2(count)), ROW_TILE=_PIECE,
            num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip
    return logprobs, ids


@dataclass(frozen=True)
class _Scratch:
    """What the scan leaves for the kernel behind it, and room for that kernel's candidates."""

    tensors: tuple[Tensor, ...]  # group ids, candidates' values and ids, parts, maxima
    num_pieces: int
    num_groups: int
    tiles: dict[str, int]


def _scan(logits: Tensor, temperature: Tensor, top_k: Tensor, seeds: Tensor, positions: Tensor) -> _Scratch:
    rows, vocab = logits.shape
    num_pieces, num_groups = triton.cdiv(vocab, _PIECE), triton.cdiv(vocab, _GROUP)
    groups_tile = triton.next_power_of_2(num_groups)

    def room(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    parts, maxima = room(num_pieces * _PARTS, torch.float32), room(num_groups, torch.float32)
    _scan_kernel[(rows, num_pieces)](
        parts, maxima,
        logits, temperature, top_k, seeds, positions,
        logits.stride(0), vocab, num_pieces, num_groups,
        PIECE=_PIECE, GROUP=_GROUP, PARTS=_PARTS,
        num_warps=8, **pdl_options(logits.device),
    )  # fmt: skip
    return _Scratch(
        tensors=(
            room(groups_tile, torch.int32),
            room(_CANDIDATES, torch.float32),
            room(_CANDIDATES, torch.int32),
            parts,
            maxima,
        ),
        num_pieces=num_pieces,
        num_groups=num_groups,
        tiles={
            "PIECES_TILE": triton.next_power_of_2(num_pieces),
            "GROUPS_TILE": groups_tile,
            "GROUP": _GROUP,
            "PARTS": _PARTS,
            "CANDIDATES": _CANDIDATES,
        },
    )


def _check_logits(logits: Tensor) -> tuple[int, int]:
    rows, vocab = logits.shape
    if not logits.is_floating_point() or logits.stride(1) != 1 or vocab >= 1 << 24:
        raise ValueError(
            "logits must be floating point [rows, vocab < 2^24], rows contiguous, "
            f"not {logits.dtype} {tuple(logits.shape)}"
        )
    return rows, vocab
