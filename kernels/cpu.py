"""The ops on a CPU, fast: the same contracts as `kernels.reference`, which stays the specification.

Three things make the difference there. Linear layers read their weights at memory speed only from oneDNN's blocked
layout (`pack_weight`). Attention over long contexts needs no gather when a sequence's blocks happen to be consecutive,
and the block manager makes that the usual case; over short ones all sequences go through one call. The sampler looks at
the likeliest thousand tokens first, and sorts the whole vocabulary only where that was not enough.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference

# oneDNN picks its blocked layout for one batch size. The layout for 16 is the one that is fast from 1 to 32 rows:
# 538 MB of weights take 30 ms at 1 row and 50 ms at 16, against 31 and 69 with the layout for 1, 46 and 86 unpacked
# (2 cores of an EPYC 7003).
_PACKED_FOR_ROWS = 16
# Gathering the K of several sequences side by side pays from 4 sequences up to here: 16 sequences of 160 tokens take
# 0.59 ms a layer so and 1.06 ms one by one, 48 of 1,200 tokens 28 and 15.
_GATHERED_FLOATS = 4 << 20
_GATHERED_SEQS = 4
_SHORT_CONTEXT = 1024  # up to here two plain products are faster than the fused attention with its set-up: 64 to 104 us
_CANDIDATES = 1024  # tokens that the sampler looks at before it falls back to the whole vocabulary


def can_pack(weight: Tensor) -> bool:
    """Whether `pack_weight` takes this weight: float32 on the CPU, in a torch that was built with oneDNN."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack_weight(weight: Tensor) -> Tensor:
    """``weight [out, in]`` in oneDNN's blocked layout: an opaque tensor that only `packed_linear` reads."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for ``x [rows, in]`` and a weight from `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`; in float32 there is no cast whose order could matter."""
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    if x.shape[0] == 1:  # four small ops instead of twelve: with cold caches each costs as much as 576 multiplications
        row = x.view(-1)
        return (x * weight).mul_((torch.dot(row, row).item() / row.shape[0] + eps) ** -0.5)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """See `reference.rotary_write_kv`; for whole heads in float32, and q and k at once where they lie side by side."""
    half, num_tokens, num_heads = cos.shape[1], *q.shape[:2]
    side_by_side = k.data_ptr() == q.data_ptr() + num_heads * q.stride(1) * q.itemsize and k.stride() == q.stride()
    if q.dtype != torch.float32 or 2 * half != q.shape[2] or not side_by_side or min(slot_mapping.tolist()) < 0:
        reference.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        return
    # [tokens, q and k heads, 2, half], in place
    both = q.as_strided((num_tokens, num_heads + k.shape[1], 2, half), (*q.stride()[:2], half, 1))
    (first, second), cos, sin = both.unbind(2), cos[:, None], sin[:, None]
    rotated = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def _sequence_kv(cache: Tensor, table: list[int], length: int) -> Tensor:
    """One sequence's ``[num_kv_heads, length, head_dim]``: a view if its blocks are consecutive, else a copy."""
    _, block_size, num_kv_heads, head_dim = cache.shape
    first, num_blocks = table[0], len(table)
    if table[-1] - first != num_blocks - 1 or table != list(range(first, first + num_blocks)):
        cache, first = cache.index_select(0, torch.tensor(table)), 0
    # One call instead of a slice, a flatten, a slice and a transpose: decoding here spends its time on views.
    return cache.as_strided(
        (num_kv_heads, length, head_dim),
        (head_dim, num_kv_heads * head_dim, 1),
        cache.storage_offset() + first * block_size * num_kv_heads * head_dim,
    )


def _tables(block_tables: Tensor, lengths: list[int], block_size: int) -> list[tuple[list[int], int]]:
    return [
        (row[: -(-length // block_size)], length) for row, length in zip(block_tables.tolist(), lengths, strict=True)
    ]


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, softmax_scale: float
) -> Tensor:
    """See `reference.paged_attention`; without the log-sum-exp."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    lengths = context_lens.tolist()
    longest = max(lengths, default=0)
    if (
        num_seqs >= _GATHERED_SEQS
        and min(lengths) > 0
        and num_seqs * longest * num_kv_heads * head_dim <= _GATHERED_FLOATS
    ):
        return _attend_together(q, k_cache, v_cache, block_tables, context_lens, longest, softmax_scale)
    # The query heads of a kv head stand as a batch of queries: nothing is repeated.
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim).unbind(0)
    outputs = []
    for query, (table, length) in zip(grouped, _tables(block_tables, lengths, k_cache.shape[1]), strict=True):
        if not length:
            outputs.append(torch.zeros_like(query))
            continue
        k, v = _sequence_kv(k_cache, table, length), _sequence_kv(v_cache, table, length)
        outputs.append(_attend_one(query, k, v, softmax_scale))
    if num_seqs == 1:
        return outputs[0].view(q.shape)
    return torch.stack(outputs).view(q.shape) if outputs else torch.empty_like(q)


def _attend_one(query: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    """``query [kv heads, group, head_dim]`` over ``k, v [kv heads, length, head_dim]``."""
    if query.dtype != torch.float32 or k.shape[1] > _SHORT_CONTEXT:
        attended = functional.scaled_dot_product_attention(query[None], k[None], v[None], scale=softmax_scale)
        return attended[0]
    scores = torch.bmm(query, k.transpose(1, 2)).mul_(softmax_scale)
    return torch.bmm(scores.softmax(-1), v)


def _attend_together(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    longest: int,
    softmax_scale: float,
) -> Tensor:
    """All sequences in two batched products over gathered K, V ``[seqs, kv heads, longest, head_dim]``.

    A sequence is padded to the longest with its own first token, and not with the slots that happen to follow: those
    may hold NaN, and 0 * NaN is NaN.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    hidden = torch.arange(longest) >= context_lens[:, None]
    blocks = block_tables[:, : -(-longest // block_size), None]
    slots = torch.add(torch.arange(block_size), blocks, alpha=block_size).flatten(1)[:, :longest]
    slots = torch.where(hidden, blocks[:, 0] * block_size, slots)
    rows = torch.add(torch.arange(num_kv_heads)[:, None], slots[:, None], alpha=num_kv_heads).flatten()
    k, v = (cache.view(-1, head_dim).index_select(0, rows).view(-1, longest, head_dim) for cache in (k_cache, v_cache))
    # The query heads of a kv head are the rows of one product: nothing is repeated.
    scores = torch.bmm((q * softmax_scale).view(len(k), -1, head_dim), k.transpose(1, 2))
    scores.view(num_seqs, num_heads, longest).masked_fill_(hidden[:, None], float("-inf"))
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    softmax_scale: float,
) -> Tensor:
    """See `reference.prefill_attention`."""
    out = torch.empty_like(q)
    starts = cu_seqlens.tolist()
    for row, (table, length) in enumerate(_tables(block_tables, context_lens.tolist(), k_cache.shape[1])):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        k, v = _sequence_kv(k_cache, table, length), _sequence_kv(v_cache, table, length)
        cached = length - (end - begin)
        mask = None
        if cached:
            mask = torch.arange(length) <= torch.arange(cached, length)[:, None]
        attended = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=softmax_scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See `reference.sample`: the same draws."""
    token_ids = logits.argmax(-1)
    drawn = temperature > 0
    truncated = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    plain = drawn & ~truncated
    if bool(plain.any()):
        rows = plain.nonzero()[:, 0]
        scaled = logits[rows] / temperature[rows, None]
        ids = torch.arange(logits.shape[1], dtype=torch.int32)[None]
        token_ids[rows] = (scaled + reference.gumbel(seeds[rows], positions[rows], ids)).argmax(-1)
    if bool(truncated.any()):
        rows = truncated.nonzero()[:, 0]
        arguments = [t[rows] for t in (logits, temperature, top_k, top_p, min_p, seeds, positions)]
        chosen, sure = _sample_candidates(*arguments)
        if not bool(sure.all()):
            unsure = (~sure).nonzero()[:, 0]
            chosen[unsure] = reference.sample(*(t[unsure] for t in arguments))
        token_ids[rows] = chosen
    return token_ids


def _sample_candidates(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw from the largest logits only. Returns (token ids, whether no token outside could have been drawn)."""
    vocab = logits.shape[1]
    wanted = torch.where(top_k > 0, top_k, _CANDIDATES)
    count = min(vocab, int(wanted.max()) + 1)  # one more than is kept shows whether the cut falls among equals
    values, ids = logits.topk(count)
    ids, by_id = ids.sort(-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    scaled = (values - values[:, :1]) / temperature[:, None]

    rank = torch.arange(count)
    kept = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    last = (kept.sum(-1) - 1).clamp_(min=0)[:, None]
    beyond = (last + 1).clamp_(max=count - 1)
    tied = (values.gather(1, last) == values.gather(1, beyond)) & (last + 1 < count)
    sure = (top_k > 0) & ~tied[:, 0]

    all_scaled = (logits - values[:, :1]) / temperature[:, None]
    total = torch.where(top_k > 0, scaled.masked_fill(~kept, float("-inf")).logsumexp(-1), all_scaled.logsumexp(-1))
    probabilities = (scaled - total[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    cut |= scaled < torch.log(min_p)[:, None]
    # Tokens behind the last candidate are cut if it and its equals are: `topk` picks any among equals.
    tail_is_cut = (cut | (values != values[:, -1:])).all(-1)
    sure |= (top_k == 0) & tail_is_cut
    if count == vocab:
        sure[:] = True
    score = scaled + reference.gumbel(seeds, positions, ids.to(torch.int32))
    choice = score.masked_fill(~kept | cut, float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(1, choice)[:, 0], sure


def top_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `reference.top_log_probabilities`, without sorting the vocabulary; any order among equals."""
    values, ids = logits.topk(count)
    return values - logits.logsumexp(-1, keepdim=True), ids
