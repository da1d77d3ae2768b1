"""The ops on a CPU, fast: the same contracts as `kernels.reference`, which stays the specification.

Three things make the difference there. Linear layers read their weights at memory speed only from oneDNN's blocked
layout (`pack_weight`). Attention needs no gather when a sequence's blocks happen to be consecutive, and the block
manager makes that the usual case. The sampler looks at the likeliest thousand tokens first, and sorts the whole
vocabulary only where that was not enough.
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


def sequence_kv(cache: Tensor, table: list[int], context_len: int) -> Tensor:
    """One sequence's ``[context_len, num_kv_heads, head_dim]``: a view if its blocks are consecutive, else a copy."""
    first, num_blocks = table[0], len(table)
    if table[-1] - first == num_blocks - 1 and table == list(range(first, first + num_blocks)):
        return cache[first : first + num_blocks].flatten(0, 1)[:context_len]
    return cache.index_select(0, torch.tensor(table)).flatten(0, 1)[:context_len]


def _tables(block_tables: Tensor, context_lens: Tensor, block_size: int) -> list[tuple[list[int], int]]:
    return [
        (row[: -(-length // block_size)], length)
        for row, length in zip(block_tables.tolist(), context_lens.tolist(), strict=True)
    ]


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, softmax_scale: float
) -> Tensor:
    """See `reference.paged_attention`; without the log-sum-exp."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    out = torch.empty_like(q)
    for row, (table, length) in enumerate(_tables(block_tables, context_lens, k_cache.shape[1])):
        if not length:
            out[row] = 0
            continue
        # The query heads of a kv head stand as a batch of queries: nothing is repeated.
        grouped = q[row].view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        k = sequence_kv(k_cache, table, length).transpose(0, 1)[None]
        v = sequence_kv(v_cache, table, length).transpose(0, 1)[None]
        attended = functional.scaled_dot_product_attention(grouped, k, v, scale=softmax_scale)
        out[row] = attended.view(num_heads, head_dim)
    return out


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
    for row, (table, length) in enumerate(_tables(block_tables, context_lens, k_cache.shape[1])):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        k = sequence_kv(k_cache, table, length).transpose(0, 1)[None]
        v = sequence_kv(v_cache, table, length).transpose(0, 1)[None]
        cached = length - (end - begin)
        mask = None
        if cached:
            positions = torch.arange(cached, length)[:, None]
            mask = torch.arange(length) <= positions
        attended = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            k,
            v,
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
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    values, ids = scaled.topk(count)
    ids, by_id = ids.sort(-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)

    rank = torch.arange(count)
    kept = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    last = (kept.sum(-1) - 1).clamp_(min=0)[:, None]
    beyond = (last + 1).clamp_(max=count - 1)
    tied = (values.gather(1, last) == values.gather(1, beyond)) & (last + 1 < count)
    sure = (top_k > 0) & ~tied[:, 0]

    values = values.masked_fill(~kept, float("-inf"))
    total = torch.where(top_k > 0, values.logsumexp(-1), scaled.logsumexp(-1))
    probabilities = (values - total[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped |= values < torch.log(min_p)[:, None]
    dropped[:, 0] = False
    # The last candidate dropped means that all behind it would be, unless it is equal to one that top-p kept.
    sure |= (top_k == 0) & dropped[:, -1] & (values[:, -1] < values[:, 0])
    if count == vocab:
        sure[:] = True
    values = values.masked_fill(dropped, float("-inf"))
    choice = (values + reference.gumbel(seeds, positions, ids.to(torch.int32))).argmax(-1, keepdim=True)
    return ids.gather(1, choice)[:, 0], sure
