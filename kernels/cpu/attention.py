"""Rotary embedding and attention on a CPU, over the paged cache.

Attention of one sequence needs no gather if its blocks are consecutive, which the block manager makes the usual case.
Several sequences of similar lengths are computed in one call, which gathers only K. Tokens that are read from an 8-bit
cache are converted to float32. The cache's scales multiply the scores and the softmax weights.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import reference
from minillm.kernels.arguments import HeadNorms, LayerCache, Pages, RotaryInputs
from minillm.kernels.attention.plan import WorkList
from minillm.kernels.cpu.linear import rms_norm

# Batching several sequences is faster than one by one (16 of 270 tokens, 9/3 heads x 64: 0.83 ms per layer instead of
# 1.46), unless padding spoils it.
_GATHERED_SEQS = 2
_GATHERED_PADDING = 2  # maximum slots to compute, padding included, per real slot
_GATHERED_FLOATS = 16 << 20  # maximum elements of gathered K: 64 MB of scratch
_SHORT_CONTEXT = 1024  # up to here two plain matmuls are faster than fused attention with its setup: 64 to 104 us


@dataclass(frozen=True)
class PaddedDecodes:
    """The inputs of decode attention over several sequences at once, padded to the longest: see `_attend_together`."""

    rows: Tensor  # [seqs * kv heads * longest] int64, rows of a cache viewed as [slots * kv heads, head_dim]
    mask: Tensor  # [seqs * kv heads, padded group, longest], -inf after a sequence's end; see `_padded`
    gathered: Tensor  # [seqs * kv heads * longest, head_dim], buffer for K, reused by all layers
    queries: Tensor  # [seqs * kv heads, padded group, head_dim], buffer for q, padded with zeros
    heads: Tensor  # [seqs, kv heads, group, head_dim], the view of `queries` without padding
    heads_rows: Tensor  # [seqs * heads * longest] int64, `rows` repeated for each query head
    heads_starts: Tensor  # [seqs * heads] int64, the start of each query head in `heads_rows`
    scales_at: Tensor | None  # [seqs * kv heads * longest] int64, indices of the scales of `rows`


@dataclass(frozen=True)
class Span:
    """The visible tokens of a sequence, and their place in the cache.

    With a window, only the last tokens are visible.
    """

    length: int  # number of visible tokens
    skipped: int  # slots of the first block before the first visible token
    first: int  # id of the first block
    blocks: Tensor | None  # ids of all blocks, int64; None if they are consecutive


@dataclass(frozen=True)
class HostPlan:
    """Inputs of the ops that are equal in all layers of a step, computed once: see `plan_step`."""

    padded: bool  # whether any slot is -1
    rotary_factors: tuple[Tensor, Tensor]  # factors of the rotary embedding: see `_rotary_factors`
    decodes: PaddedDecodes | list[Span]  # decode attention: all sequences at once if that is faster, else one by one


def plan_step(rope: RotaryInputs, decodes: Pages, num_heads: int) -> HostPlan:
    """Compute the inputs that all layers of a step share, because they depend only on positions and slots."""
    return HostPlan(bool((rope.slots < 0).any()), _rotary_factors(rope), _plan_decodes(decodes, num_heads))


def _rotary_factors(rope: RotaryInputs) -> tuple[Tensor, Tensor]:
    """Return the factors of the rotary embedding: cosines ``[tokens, 1, 1, half]``, and sines ``[tokens, 1, 2, half]``.

    The sines are for a head with its halves swapped. The sines of the first half are negative.
    """
    return rope.cos[:, None, None], torch.stack((-rope.sin, rope.sin), dim=1)[:, None]


def _plan_decodes(pages: Pages, num_heads: int) -> PaddedDecodes | list[Span]:
    """Decide from the context lengths whether to attend to all sequences at once or to one at a time.

    Return the inputs of the chosen method: a `PaddedDecodes`, or a `Span` for each sequence.
    """
    _, _, num_kv_heads, head_dim = pages.k.shape
    lengths = pages.lens.tolist()
    seen = [min(length, pages.window or length) for length in lengths]
    longest = max(seen, default=0)
    if (
        len(seen) >= _GATHERED_SEQS
        and min(seen) > 0
        and len(seen) * longest <= _GATHERED_PADDING * sum(seen)
        and len(seen) * longest * num_kv_heads * head_dim <= _GATHERED_FLOATS
    ):
        return _plan_together(pages, longest, num_heads)
    return _spans(pages, lengths, seen)


def _plan_together(pages: Pages, longest: int, num_heads: int) -> PaddedDecodes:
    """Return the inputs for all sequences at once, each padded to ``longest`` with its own first token.

    Padding with other slots could read NaN, which a weight of 0 does not hide: 0 * NaN is NaN.
    """
    k_cache, _, tables, lens, window, scales, _ = pages
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    dtype = k_cache.dtype if scales is None else torch.float32
    num_seqs, group = len(lens), num_heads // num_kv_heads
    if window is None:
        hidden = torch.arange(longest) >= lens[:, None]
        blocks = tables[:, : -(-longest // block_size), None]
        slots = torch.add(torch.arange(block_size), blocks, alpha=block_size).flatten(1)[:, :longest]
    else:  # only the end of each context
        tokens = torch.arange(longest) + (lens - window).clamp_(min=0)[:, None]
        hidden = tokens >= lens[:, None]
        tokens = tokens.masked_fill_(hidden, 0)
        slots = tables.gather(1, tokens // block_size) * block_size + tokens % block_size
    slots = torch.where(hidden, slots[:, :1], slots)
    rows = torch.add(torch.arange(num_kv_heads)[:, None], slots[:, None], alpha=num_kv_heads)
    scales_at = None
    if scales is not None:
        indices = slots // block_size * (num_kv_heads * block_size) + slots % block_size
        scales_at = torch.add(indices[:, None], torch.arange(num_kv_heads)[:, None], alpha=block_size).flatten()
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    queries = torch.zeros(num_seqs * num_kv_heads, _padded(group), head_dim, dtype=dtype)
    return PaddedDecodes(
        rows=rows.flatten(),
        mask=mask.repeat_interleave(num_kv_heads, 0)[:, None].expand(-1, _padded(group), -1),
        gathered=k_cache.new_empty(num_seqs * num_kv_heads * longest, head_dim),
        queries=queries,
        heads=queries[:, :group].view(-1, num_kv_heads, group, head_dim),
        heads_rows=rows.repeat_interleave(group, 1).flatten(),
        heads_starts=torch.arange(num_seqs * num_heads) * longest,
        scales_at=scales_at,
    )


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: RotaryInputs,
    cache: LayerCache,
    norms: HeadNorms | None = None,
    plan: HostPlan | None = None,
) -> None:
    """Compute `reference.rotary_write_kv`. It is fast if whole float32 heads are rotated, and q and k are adjacent in
    memory.
    """
    half, num_tokens, num_heads = rope.cos.shape[1], *q.shape[:2]
    side_by_side = k.data_ptr() == q.data_ptr() + num_heads * q.stride(1) * q.itemsize and k.stride() == q.stride()
    padded = bool((rope.slots < 0).any()) if plan is None else plan.padded
    if q.dtype != torch.float32 or 2 * half != q.shape[2] or not side_by_side or padded:
        reference.rotary_write_kv(q, k, v, rope, cache, norms)
        return
    if norms is not None and not norms.after_rotary:
        _normalize(q, k, norms)
    # [tokens, q and k heads, 2, half]
    both = q.as_strided((num_tokens, num_heads + k.shape[1], 2, half), (*q.stride()[:2], half, 1))
    straight, across = _rotary_factors(rope) if plan is None else plan.rotary_factors
    changed_about = both.flip(2)
    both.mul_(straight).addcmul_(changed_about, across)
    if norms is not None and norms.after_rotary:
        _normalize(q, k, norms)
    if cache.k_scales is None:
        cache.k.view(-1, *k.shape[1:]).index_copy_(0, rope.slots, k)
        cache.v.view(-1, *v.shape[1:]).index_copy_(0, rope.slots, v)
    else:
        _write_in_8_bits(cache, rope.slots, torch.stack((k, v)))


def _normalize(q: Tensor, k: Tensor, norms: HeadNorms) -> None:
    """Apply RMSNorm to each head of q and k, in place."""
    for heads, weight in ((q, norms.q), (k, norms.k)):
        heads.copy_(rms_norm(heads.flatten(0, 1), weight, norms.eps).view(heads.shape))


def _write_in_8_bits(cache: LayerCache, slots: Tensor, rows: Tensor) -> None:
    """Write K and V, ``rows [2, tokens, heads, dim]``, to an 8-bit cache: see `reference.write_rows`.

    K and V are quantized in one call, because call overhead dominates.
    """
    assert cache.k_scales is not None
    assert cache.v_scales is not None
    levels, scales = reference.quantize_rows(rows)
    block_size, shape = cache.k.shape[1], (-1, *rows.shape[2:])
    blocks, offsets = slots // block_size, slots % block_size
    cache.k.view(shape).index_copy_(0, slots, levels[0])
    cache.v.view(shape).index_copy_(0, slots, levels[1])
    cache.k_scales[blocks, :, offsets] = scales[0]
    cache.v_scales[blocks, :, offsets] = scales[1]


def _sequence_kv(cache: Tensor, span: Span) -> Tensor:
    """Return one sequence's K or V, ``[num_kv_heads, length, head_dim]``: a view if its blocks are consecutive, else a
    copy.
    """
    _, block_size, num_kv_heads, head_dim = cache.shape
    first = span.first
    if span.blocks is not None:
        cache, first = cache.index_select(0, span.blocks), 0
    # One call instead of a slice, a flatten, a slice and a transpose: views take most of the time here.
    shape, strides = (num_kv_heads, span.length, head_dim), (head_dim, num_kv_heads * head_dim, 1)
    slot = first * block_size + span.skipped
    return cache.as_strided(shape, strides, cache.storage_offset() + slot * num_kv_heads * head_dim)


def _sequence_scales(scales: Tensor, span: Span) -> Tensor:
    """Return the scales of one sequence's K or V, ``[num_kv_heads, length]``."""
    block_size = scales.shape[2]
    end = span.skipped + span.length
    count = -(-end // block_size)
    own = scales[span.first : span.first + count] if span.blocks is None else scales.index_select(0, span.blocks)
    return own.transpose(0, 1).flatten(1)[:, span.skipped : end]


def _numbers(pages: Pages, span: Span) -> tuple[Tensor, Tensor]:
    """Return one sequence's K and V, each ``[num_kv_heads, length, head_dim]``. An 8-bit cache is dequantized to
    float32.
    """
    k, v = _sequence_kv(pages.k, span), _sequence_kv(pages.v, span)
    if pages.k_scales is None or pages.v_scales is None:
        return k, v
    k_scales, v_scales = _sequence_scales(pages.k_scales, span), _sequence_scales(pages.v_scales, span)
    return k.float().mul_(k_scales[..., None]), v.float().mul_(v_scales[..., None])


def _spans(pages: Pages, lengths: list[int], seen: list[int]) -> list[Span]:
    """Return the visible part of each sequence: the last ``seen[i]`` of its ``lengths[i]`` tokens."""
    spans, block_size = [], pages.k.shape[1]
    for row, length, count in zip(pages.tables.tolist(), lengths, seen, strict=True):
        begin, skipped = divmod(length - count, block_size)
        blocks = row[begin : -(-length // block_size)]
        first = blocks[0] if blocks else 0
        consecutive = blocks == list(range(first, first + len(blocks)))
        spans.append(Span(count, skipped, first, None if consecutive else torch.tensor(blocks)))
    return spans


def paged_attention(q: Tensor, pages: Pages, softmax_scale: float, plan: HostPlan | None = None) -> Tensor:
    """Compute `reference.paged_attention`."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = pages.k.shape[2]
    decodes = _plan_decodes(pages, num_heads) if plan is None else plan.decodes
    if isinstance(decodes, PaddedDecodes):
        return _attend_together(q, pages, decodes, softmax_scale)
    # The query heads of a kv head form a batch of queries, so K and V are not repeated.
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim).unbind(0)
    outputs = [_attend_one(query, pages, span, softmax_scale) for query, span in zip(grouped, decodes, strict=True)]
    if num_seqs == 1:
        return outputs[0].view(q.shape)
    return torch.stack(outputs).view(q.shape) if outputs else torch.empty_like(q)


def prefix_attention(q: Tensor, pages: Pages, softmax_scale: float, work: WorkList) -> Tensor:
    """Compute `reference.prefix_attention`."""
    return paged_attention(q, pages, softmax_scale)


def _attend_one(query: Tensor, pages: Pages, span: Span, softmax_scale: float) -> Tensor:
    """Compute attention of ``query [kv heads, group, head_dim]`` over one sequence. An empty sequence gives zeros."""
    if not span.length:
        return torch.zeros_like(query)
    k, v = _sequence_kv(pages.k, span), _sequence_kv(pages.v, span)
    if pages.k_scales is not None and pages.v_scales is not None:
        scores = torch.bmm(query.float() * softmax_scale, k.float().transpose(1, 2))
        scores.mul_(_sequence_scales(pages.k_scales, span)[:, None])
        weights = scores.softmax(-1).mul_(_sequence_scales(pages.v_scales, span)[:, None])
        return torch.bmm(weights, v.float()).to(query.dtype)
    if query.dtype != torch.float32 or k.shape[1] > _SHORT_CONTEXT:
        return functional.scaled_dot_product_attention(query[None], k[None], v[None], scale=softmax_scale)[0]
    scores = torch.bmm(query * softmax_scale, k.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), v)


def _padded(group: int) -> int:
    """Return the number of matmul rows for a group of query heads: MKL multiplies 4 rows faster than 3."""
    return 4 if group == 3 else group


def _attend_together(q: Tensor, pages: Pages, together: PaddedDecodes, softmax_scale: float) -> Tensor:
    """Compute attention of all sequences at once: a batched matmul over gathered K, then weighted sums of V's rows.

    V is not gathered. FBGEMM, which torch includes for recommendation models, computes weighted sums of listed rows at
    memory speed.
    """
    num_kv_heads, head_dim = pages.k.shape[2:]
    if together.scales_at is not None:
        return _attend_together_in_8_bits(q, pages, together, softmax_scale)
    # The query heads of a kv head are the rows of one matmul, so K and V are not repeated.
    together.heads.copy_(q.view(together.heads.shape))
    torch.index_select(pages.k.view(-1, head_dim), 0, together.rows, out=together.gathered)
    k = together.gathered.view(together.queries.shape[0], -1, head_dim)
    scores = torch.baddbmm(together.mask, together.queries, k.transpose(1, 2), alpha=softmax_scale)
    weights = scores[:, : q.shape[1] // num_kv_heads].softmax(-1)
    # Skips the checks of `functional.embedding_bag`: mode 0 (sum), no gradient scaling, no sparse gradient.
    attended = torch.embedding_bag(
        pages.v.view(-1, head_dim), together.heads_rows, together.heads_starts, False, 0, False, weights.view(-1)
    )[0]
    return attended.view(q.shape)


def _attend_together_in_8_bits(q: Tensor, pages: Pages, together: PaddedDecodes, softmax_scale: float) -> Tensor:
    """Compute `_attend_together` for an 8-bit cache, with K and V gathered and converted to float32."""
    assert together.scales_at is not None
    assert pages.k_scales is not None
    assert pages.v_scales is not None
    head_dim = q.shape[2]
    together.heads.copy_(q.view(together.heads.shape))
    shape = (together.queries.shape[0], -1, head_dim)
    torch.index_select(pages.k.view(-1, head_dim), 0, together.rows, out=together.gathered)
    k = together.gathered.view(shape).float()
    scores = torch.bmm(together.queries, k.transpose(1, 2)).mul_(softmax_scale)
    scores.mul_(pages.k_scales.view(-1).index_select(0, together.scales_at).view(len(scores), 1, -1))
    weights = scores.add_(together.mask).softmax(-1)
    weights.mul_(pages.v_scales.view(-1).index_select(0, together.scales_at).view(len(scores), 1, -1))
    torch.index_select(pages.v.view(-1, head_dim), 0, together.rows, out=together.gathered)
    attended = torch.bmm(weights, together.gathered.view(shape).float())
    return attended[:, : q.shape[1] // pages.k.shape[2]].reshape(q.shape).to(q.dtype)


def prefill_attention(q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Compute `reference.prefill_attention`."""
    out = torch.empty_like(q)
    chunks, lengths = list(pairwise(cu_seqlens.tolist())), pages.lens.tolist()
    # A chunk's first query sees the oldest tokens.
    seen = [min(n, (pages.window or n) + end - begin - 1) for n, (begin, end) in zip(lengths, chunks, strict=True)]
    for (begin, end), span in zip(chunks, _spans(pages, lengths, seen), strict=True):
        if begin == end:
            continue
        k, v = _numbers(pages, span)
        query = q[begin:end].transpose(0, 1)[None].to(k.dtype)
        mask = _visible(end - begin, span.length, pages.window)
        attended = functional.scaled_dot_product_attention(
            query, k[None], v[None], mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


def _visible(count: int, length: int, window: int | None) -> Tensor | None:
    """Return the mask ``[count, length]`` of tokens that the last ``count`` of a sequence's ``length`` tokens attend
    to.

    Return None if plain causal attention computes the same: every token is a query, and no window hides any token.
    """
    if count == length and (window is None or window >= length):
        return None
    tokens, queries = torch.arange(length), torch.arange(length - count, length)[:, None]
    visible = tokens <= queries
    return visible if window is None else visible.logical_and_(tokens > queries - window)
