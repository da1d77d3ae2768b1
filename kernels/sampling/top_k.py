"""The k largest logits of a row, in order, without sorting the row; also the sampler's top-k and top-p cuts.

The scan (`sampling.scan`) stores the maximum of every group of adjacent logits. If the k-th largest of these maxima is
t, at least k logits are >= t, and usually few more. These logits are collected on chip, where a bisection over the
ordered bits of a float finds the k largest. If k is too large for that, or too many logits are equal, the bisection
runs over the whole row, which is slower but exact. Up to 16 tokens, as for beams, are taken one after another: first
the groups with the largest maxima, then the largest of their logits. Equal logits are ordered by id, lower first. A
*key* is the `ordered` bits of a logit. Grid: (rows). Bytes: those of the scan, and the groups that are read again, from
L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels import reference
from minillm.kernels.arguments import next_power_of_2
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.sampling.scan import PIECE, check_logits, ordered, read_parts, scan

_MOST = 256  # maximum count to rank by comparing all pairs
_FEW = 16  # maximum count to take one after another
_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _nth_largest(keys, n, low, high):
    """Return a key from ``low`` to ``high`` that separates the ``n`` largest of ``keys`` from the smaller keys.

    The ``n`` largest keys are at least the result, and all smaller keys are below it. Keys equal to the n-th are not
    below it.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        if count >= n:
            low = middle
        else:
            high = middle - 1
        if count == n:  # it already separates them
            high = low
    return low.to(tl.int32)


@triton.jit
def is_above(keys, ids, key, token):
    """Return a mask of the tokens that come before ``(key, token)``: they have a larger key, or an equal key and a
    lower id.
    """
    return (keys > key) | ((keys == key) & (ids < token))


@triton.jit
def row_above(row_ptr, vocab, key, token, anchor, temperature, TILE: tl.constexpr):
    """Count the tokens of the whole row that come before ``(key, token)``, and add up their probabilities.

    Returns: the count; the sum of ``exp((logit - anchor) / temperature)``.
    """
    counts = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=3):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        above = (ids < vocab) & is_above(ordered(x), ids, key, token)
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp((x - anchor) / temperature), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def row_top_k(row_ptr, vocab, top_k, low, high, TILE: tl.constexpr):
    """Return the threshold ``(key, id)`` of top-k for a whole row: exactly ``top_k`` tokens come before it.

    It is found by bisection: first the key, then the id among tokens with that key. The order is that of `is_above`.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count, _mass = row_above(row_ptr, vocab, middle.to(tl.int32), vocab, 0.0, 1.0, TILE)
        if count >= top_k:
            low = middle
        else:
            high = middle - 1
        if count == top_k:
            high = low
    key = low.to(tl.int32)
    # Among logits equal to the cut, those with the lowest ids stay.
    first, last = 0, vocab
    while first < last:
        middle = (first + last) // 2
        count, _mass = row_above(row_ptr, vocab, key, middle, 0.0, 1.0, TILE)
        if count >= top_k:
            last = middle
        else:
            first = middle + 1
    return key, first


@triton.jit
def collect(
    row, row_ptr, maxima_ptr, groups_ptr, values_ptr, ids_ptr, vocab, num_groups, n, high,
    GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write all logits of a row that reach a threshold to ``values_ptr``, and their ids to ``ids_ptr``, in order of id.

    The threshold is the n-th largest of the groups' maxima, so at least ``n`` logits reach it. Returns: the threshold;
    the number of logits that reach it. Logits beyond the first ``CANDIDATES`` are not written.
    """
    groups = tl.arange(0, GROUPS_TILE)
    is_group = groups < num_groups
    keys = ordered(tl.load(maxima_ptr + row * num_groups + groups, mask=is_group, other=float("-inf")))
    lowest = tl.min(tl.where(is_group, keys, high), axis=0)
    threshold = _nth_largest(keys, tl.minimum(n, num_groups), lowest, high)
    active = is_group & (keys >= threshold)
    places = tl.cumsum(active.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + row * GROUPS_TILE + places, groups, mask=active)
    num_active = tl.sum(active.to(tl.int32), axis=0)
    tl.debug_barrier()  # threads read the results of others
    found = 0
    flat = tl.arange(0, CANDIDATES)
    for start in range(0, num_active * GROUP, CANDIDATES):
        number = (start + flat) // GROUP
        group = tl.load(groups_ptr + row * GROUPS_TILE + number, mask=number < num_active, other=0)
        ids = group * GROUP + flat % GROUP
        valid = (number < num_active) & (ids < vocab)
        x = tl.load(row_ptr + ids, mask=valid, other=float("-inf")).to(tl.float32)
        reached = valid & (ordered(x) >= threshold)
        place = found + tl.cumsum(reached.to(tl.int32), axis=0) - 1
        fits = reached & (place < CANDIDATES)
        tl.store(values_ptr + row * CANDIDATES + place, x, mask=fits)
        tl.store(ids_ptr + row * CANDIDATES + place, ids, mask=fits)
        found += tl.sum(reached.to(tl.int32), axis=0)
    tl.debug_barrier()
    return threshold, found


@triton.jit
def keep_top(keys, held, n, threshold, low, high):
    """Return a mask of the ``n`` largest candidates, lower ids first among equals.

    ``held`` marks existing candidates, which are in order of id. ``threshold``, ``low`` and ``high`` bound their keys.
    """
    cut = _nth_largest(tl.where(held, keys, low), n, threshold, high)
    equal = held & (keys == cut)
    missing = n - tl.sum((held & (keys > cut)).to(tl.int32), axis=0)
    return held & ((keys > cut) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing)))


@launched
@triton.jit
def _top_kernel(
    out_logprobs_ptr, out_ids_ptr, groups_ptr, values_ptr, ids_ptr, parts_ptr, maxima_ptr, logits_ptr,
    row_stride, vocab, num_pieces, num_groups, count,
    PIECES_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, COUNT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the ``count`` largest logits of a row in order, as log-probabilities."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    _part_ptr, _is_piece, _piece_maxima, maximum, anchor, total = read_parts(
        parts_ptr, row, num_pieces, PIECES_TILE, PARTS
    )
    log_total = anchor + tl.log(total)
    high = ordered(maximum)
    low = ordered(maximum * 0.0 - float("inf"))
    threshold, found = collect(
        row, row_ptr, maxima_ptr, groups_ptr, values_ptr, ids_ptr, vocab, num_groups, count, high,
        GROUPS_TILE, GROUP, CANDIDATES,
    )  # fmt: skip
    if (found > CANDIDATES) | (count > num_groups):
        # Too many candidates: overwrite them with exactly the needed ones.
        key, limit = row_top_k(row_ptr, vocab, count, low, high, ROW_TILE)
        found = 0
        for start in range(0, vocab, ROW_TILE):
            ids = start + tl.arange(0, ROW_TILE)
            x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            kept = (ids < vocab) & is_above(ordered(x), ids, key, limit)
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
    kept = keep_top(ordered(x), held, count, threshold, low, high)
    places = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # all threads have read the candidates before they are overwritten
    tl.store(values_ptr + row * CANDIDATES + places, x, mask=kept)
    tl.store(ids_ptr + row * CANDIDATES + places, ids, mask=kept)
    tl.debug_barrier()
    slots = tl.arange(0, COUNT_TILE)
    x = tl.load(values_ptr + row * CANDIDATES + slots, mask=slots < count, other=float("-inf"))
    ids = tl.load(ids_ptr + row * CANDIDATES + slots, mask=slots < count, other=vocab)
    # Few enough to compare all pairs; candidates are in order of id, so equals keep their order.
    before = (x[:, None] > x[None, :]) | ((x[:, None] == x[None, :]) & (ids[:, None] < ids[None, :]))
    rank = tl.sum(before.to(tl.int32), axis=0)
    tl.store(out_logprobs_ptr + row * count + rank, x - log_total, mask=slots < count)
    tl.store(out_ids_ptr + row * count + rank, ids.to(tl.int64), mask=slots < count)


@triton.jit
def _before(x, ids):
    """Return an int64 key for each logit. A larger logit has a larger key. Among equal logits, a lower id has a larger
    key.
    """
    return (ordered(x).to(tl.int64) << 32) + (0x7FFFFFFF - ids).to(tl.int64)


@launched
@triton.jit
def _few_kernel(
    out_logprobs_ptr, out_ids_ptr, parts_ptr, maxima_ptr, logits_ptr,
    row_stride, vocab, num_pieces, num_groups, count,
    PIECES_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    COUNT_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the same as `_top_kernel`, but only for a small ``count``: at most `_FEW`, and at most ``num_groups``.

    The ``count`` largest logits are all in the ``count`` groups with the largest maxima, because these maxima come
    before all logits of other groups.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    _part_ptr, _is_piece, _maxima, _maximum, anchor, total = read_parts(parts_ptr, row, num_pieces, PIECES_TILE, PARTS)
    log_total = anchor + tl.log(total)
    slots = tl.arange(0, COUNT_TILE)
    groups = tl.arange(0, GROUPS_TILE)
    is_group = groups < num_groups
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=is_group, other=0.0)
    keys = tl.where(is_group, _before(maxima, groups), _LOWEST)
    chosen = slots * 0
    for place in range(count):
        first = tl.max(keys, axis=0)
        keys = tl.where(keys == first, _LOWEST, keys)
        chosen = tl.where(slots == place, 0x7FFFFFFF - (first & 0x7FFFFFFF).to(tl.int32), chosen)
    ids = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    held = (slots < count)[:, None] & (ids < vocab)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=held, other=0.0).to(tl.float32)
    keys = tl.where(held, _before(x, ids), _LOWEST)
    for place in range(count):
        first = tl.max(tl.max(keys, axis=1), axis=0)
        keys = tl.where(keys == first, _LOWEST, keys)
        bits = (first >> 32).to(tl.int32)
        value = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        tl.store(out_logprobs_ptr + row * count + place, value - log_total)
        tl.store(out_ids_ptr + row * count + place, 0x7FFFFFFF - (first & 0x7FFFFFFF))


def top_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `reference.top_log_probabilities`, for logits as in `sample_with_logprobs` and ``count`` from 1 to vocab.

    Raises ValueError otherwise. If ``count`` is above 256, torch sorts the rows.
    """
    rows, vocab = check_logits(logits)
    if not 1 <= count <= vocab:
        raise ValueError(f"count must be from 1 to {vocab}, not {count}")
    if count > _MOST:
        return reference.top_log_probabilities(logits.float(), count)
    logprobs = logits.new_empty(rows, count, dtype=torch.float32)
    ids = logits.new_empty(rows, count, dtype=torch.int64)
    if not rows:
        return logprobs, ids
    scratch = scan(logits, None)
    if count <= min(_FEW, scratch.counts[1]):
        tiles = {name: tile for name, tile in scratch.tiles.items() if name != "CANDIDATES"}
        _few_kernel[(rows,)](
            logprobs, ids, *scratch.tensors[3:], logits, logits.stride(0), vocab, *scratch.counts, count,
            **tiles, COUNT_TILE=_FEW, num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip
    else:
        _top_kernel[(rows,)](
            logprobs, ids, *scratch.tensors, logits, logits.stride(0), vocab, *scratch.counts, count,
            **scratch.tiles, COUNT_TILE=max(16, next_power_of_2(count)), ROW_TILE=PIECE,
            num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip
    return logprobs, ids
