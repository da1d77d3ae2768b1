"""The ops on a CPU, fast: the same contracts as `minillm.kernels.reference`, which stays the specification.

Three things make the difference there. Linear layers read their weights at memory speed only from a blocked layout, and
half as many bytes where float16 holds them as well (`packed_linear`). Attention of one sequence needs no gather when
its blocks happen to be consecutive, and the block manager makes that the usual case; several of similar lengths go
through one call that gathers K only. The sampler looks at the likeliest thousand tokens first, and sorts the whole
vocabulary only where that was not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from minillm.kernels import reference

# oneDNN picks its blocked layout for one batch size. The layout for 16 is the one that is fast from 1 to 32 rows:
# 538 MB of weights take 30 ms at 1 row and 50 ms at 16, against 31 and 69 with the layout for 1, 46 and 86 unpacked
# (2 cores of an EPYC 7003).
_PACKED_FOR_ROWS = 16
_FBGEMM = ("x86", "fbgemm")  # torch's names for the engines that multiply float32 by float16 weights
_CHECKED_AT_ONCE = 1 << 18  # weights
# Several sequences at once take half to nine tenths of the time that they take one by one: 16 of 270 tokens 0.83 ms a
# layer and 1.46, 48 of 1,200 tokens 13.1 and 15.6 (9 heads on 3, of 64). The rest is for what padding would spoil.
_GATHERED_SEQS = 2
_GATHERED_PADDING = 2  # slots that are computed, per slot that counts
_GATHERED_FLOATS = 16 << 20  # of K: 64 MB of scratch
_SHORT_CONTEXT = 1024  # up to here two plain products are faster than the fused attention with its set-up: 64 to 104 us
_CANDIDATES = 1024  # tokens that the sampler looks at before it falls back to the whole vocabulary


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer in the layout from which it is read fastest."""

    apply: Callable[[Tensor], Tensor]  # x [rows, in] -> x @ weight.T + bias [rows, out], float32
    itemsize: int  # bytes of a weight


def packed_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """The fastest layout for ``weight [out, in]`` and ``bias [out]``.

    Arithmetic, ``x`` and the result are float32. The weight is kept in float16 where that changes nothing that float32
    could tell (`fits_float16`): so it is with every checkpoint that was published in bfloat16 or float16, and a token
    then costs half the bytes.

    Returns None where nothing is faster than `torch.nn.functional.linear`: weights that are not float32 on a CPU, or a
    torch without these libraries.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():
        return None
    if torch.backends.quantized.engine in _FBGEMM and fits_float16(weight):
        half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        return PackedLinear(partial(_multiply_float16, half), torch.float16.itemsize)
    if torch.backends.mkldnn.is_available():
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise
        return PackedLinear(lambda x: multiply(x, blocked, bias, "none", [], ""), weight.itemsize)
    return None


def _multiply_float16(half: torch.ScriptObject, x: Tensor) -> Tensor:
    # torch asks every argument for `__torch_function__` first, and a packed weight answers with C++ exceptions. Without
    # them a token takes 24 ms instead of 31, a step of 16 sequences 85 instead of 92 to 101.
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.quantized.linear_dynamic_fp16.op(x, half)


def fits_float16(weight: Tensor) -> bool:
    """Whether products with ``weight [out, in]`` in float16 are as exact as float32 makes them.

    bfloat16 numbers have fewer digits than float16's; only those below 2^-14 may lose some, 2^-25 at most. That is lost
    in the rounding of a float32 sum as long as it is below 2^-23 of a typical row's length (its Euclidean norm).
    """
    limit = 2**-23 * float(torch.linalg.vector_norm(weight)) / weight.shape[0] ** 0.5
    for rows in weight.split(max(1, _CHECKED_AT_ONCE // weight.shape[1])):  # so that the copies stay in the cache
        if not float((rows.half().float() - rows).abs_().max()) <= limit:  # inf or NaN do not fit either
            return False
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`; in float32 there is no cast whose order could matter."""
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    if x.shape[0] == 1:  # four small ops instead of twelve: with cold caches each costs as much as 576 multiplications
        row = x.view(-1)
        return (x * weight).mul_((torch.dot(row, row).item() / row.shape[0] + eps) ** -0.5)
    # sqrt(mean(x^2) + eps) in three ops: a seventh of the time of torch's own for 2,048 rows, six tenths for 16.
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5).hypot_(_scalar(eps**0.5))
    return (x * weight).div_(root)


@cache
def _scalar(value: float) -> Tensor:
    """For ops that take tensors only."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


@dataclass(frozen=True)
class Together:
    """The KV slots of several sequences side by side: see `_attend_together`."""

    rows: Tensor  # [seqs * kv heads * longest] int64, rows of a cache seen as [slots * kv heads, head_dim]
    mask: Tensor  # [seqs * kv heads, query heads of each as padded, longest], -inf behind a sequence's end
    gathered: Tensor  # [seqs * kv heads * longest, head_dim], room for K: new memory for each layer costs more
    queries: Tensor  # [seqs * kv heads, query heads of each as padded, head_dim], room for q, and zeros
    heads: Tensor  # [seqs, kv heads, query heads of each, head_dim], where in `queries` q goes
    heads_rows: Tensor  # [seqs * heads * longest] int64, `rows` for each query head
    heads_starts: Tensor  # [seqs * heads] int64, where each query head's begin


@dataclass(frozen=True)
class Span:
    """Where one sequence's blocks lie."""

    length: int  # in tokens
    first: int  # the first block
    blocks: Tensor | None  # all of them, where they are not consecutive: int64


@dataclass(frozen=True)
class HostPlan:
    """What every layer's ops would otherwise work out again from a step's positions, tables, slots and lengths."""

    padded: bool  # whether a slot is -1
    turn: tuple[Tensor, Tensor]  # see `_turn`
    decodes: Together | list[Span]  # at once where that is the fastest way, else one by one


def plan_step(
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    k_cache: Tensor,
    num_heads: int,
) -> HostPlan:
    """Work out once for all layers what depends on where the tokens lie.

    Args:
        cos: ``[tokens, rotary_dim / 2]`` of the whole step.
        sin: the same.
        slot_mapping: ``[tokens]``.
        block_tables: ``[num_decodes, max_blocks]`` of the decoding sequences.
        context_lens: ``[num_decodes]``.
        k_cache: any layer's, for its shape.
        num_heads: of the queries.
    """
    decodes = _plan_decodes(block_tables, context_lens, k_cache, num_heads)
    return HostPlan(padded=bool((slot_mapping < 0).any()), turn=_turn(cos, sin), decodes=decodes)


def _turn(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What the halves of a head, and the halves changed about, are multiplied by to rotate it.

    ``[tokens, 1, 1, half]`` and ``[tokens, 1, 2, half]``: first * cos - second * sin, second * cos + first * sin.
    """
    return cos[:, None, None], torch.stack((-sin, sin), dim=1)[:, None]


def _plan_decodes(block_tables: Tensor, context_lens: Tensor, k_cache: Tensor, num_heads: int) -> Together | list[Span]:
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    lengths = context_lens.tolist()
    longest = max(lengths, default=0)
    if (
        len(lengths) >= _GATHERED_SEQS
        and min(lengths) > 0
        and len(lengths) * longest <= _GATHERED_PADDING * sum(lengths)
        and len(lengths) * longest * num_kv_heads * head_dim <= _GATHERED_FLOATS
    ):
        return _plan_together(block_tables, context_lens, longest, k_cache, num_heads)
    return _spans(block_tables, lengths, block_size)


def _plan_together(
    block_tables: Tensor, context_lens: Tensor, longest: int, k_cache: Tensor, num_heads: int
) -> Together:
    """A sequence is padded to the longest with its own first token, and not with the slots that happen to follow: those
    may hold NaN, and 0 * NaN is NaN.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    group = num_heads // num_kv_heads
    hidden = torch.arange(longest) >= context_lens[:, None]
    blocks = block_tables[:, : -(-longest // block_size), None]
    slots = torch.add(torch.arange(block_size), blocks, alpha=block_size).flatten(1)[:, :longest]
    slots = torch.where(hidden, blocks[:, 0] * block_size, slots)
    rows = torch.add(torch.arange(num_kv_heads)[:, None], slots[:, None], alpha=num_kv_heads)
    mask = torch.zeros(hidden.shape, dtype=k_cache.dtype).masked_fill_(hidden, float("-inf"))
    queries = k_cache.new_zeros(len(context_lens) * num_kv_heads, _padded(group), head_dim)
    return Together(
        rows=rows.flatten(),
        mask=mask.repeat_interleave(num_kv_heads, 0)[:, None].expand(-1, _padded(group), -1),
        gathered=k_cache.new_empty(len(context_lens) * num_kv_heads * longest, head_dim),
        queries=queries,
        heads=queries[:, :group].view(-1, num_kv_heads, group, head_dim),
        heads_rows=rows.repeat_interleave(group, 1).flatten(),
        heads_starts=torch.arange(len(context_lens) * num_heads) * longest,
    )


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    plan: HostPlan | None = None,
) -> None:
    """See `reference.rotary_write_kv`; for whole heads in float32, and q and k at once where they lie side by side."""
    half, num_tokens, num_heads = cos.shape[1], *q.shape[:2]
    side_by_side = k.data_ptr() == q.data_ptr() + num_heads * q.stride(1) * q.itemsize and k.stride() == q.stride()
    padded = bool((slot_mapping < 0).any()) if plan is None else plan.padded
    if q.dtype != torch.float32 or 2 * half != q.shape[2] or not side_by_side or padded:
        reference.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        return
    # [tokens, q and k heads, 2, half]
    both = q.as_strided((num_tokens, num_heads + k.shape[1], 2, half), (*q.stride()[:2], half, 1))
    straight, across = _turn(cos, sin) if plan is None else plan.turn
    changed_about = both.flip(2)
    both.mul_(straight).addcmul_(changed_about, across)
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def _sequence_kv(cache: Tensor, span: Span) -> Tensor:
    """One sequence's ``[num_kv_heads, length, head_dim]``: a view if its blocks are consecutive, else a copy."""
    _, block_size, num_kv_heads, head_dim = cache.shape
    first = span.first
    if span.blocks is not None:
        cache, first = cache.index_select(0, span.blocks), 0
    # One call instead of a slice, a flatten, a slice and a transpose: decoding here spends its time on views.
    return cache.as_strided(
        (num_kv_heads, span.length, head_dim),
        (head_dim, num_kv_heads * head_dim, 1),
        cache.storage_offset() + first * block_size * num_kv_heads * head_dim,
    )


def _spans(block_tables: Tensor, lengths: list[int], block_size: int) -> list[Span]:
    spans = []
    for row, length in zip(block_tables.tolist(), lengths, strict=True):
        blocks = row[: -(-length // block_size)]
        first = blocks[0] if blocks else 0
        consecutive = blocks == list(range(first, first + len(blocks)))
        spans.append(Span(length, first, None if consecutive else torch.tensor(blocks)))
    return spans


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    plan: HostPlan | None = None,
) -> Tensor:
    """See `reference.paged_attention`."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    decodes = _plan_decodes(block_tables, context_lens, k_cache, num_heads) if plan is None else plan.decodes
    if isinstance(decodes, Together):
        return _attend_together(q, k_cache, v_cache, decodes, softmax_scale)
    # The query heads of a kv head stand as a batch of queries: nothing is repeated.
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim).unbind(0)
    outputs = []
    for query, span in zip(grouped, decodes, strict=True):
        if not span.length:
            outputs.append(torch.zeros_like(query))
            continue
        k, v = _sequence_kv(k_cache, span), _sequence_kv(v_cache, span)
        outputs.append(_attend_one(query, k, v, softmax_scale))
    if num_seqs == 1:
        return outputs[0].view(q.shape)
    return torch.stack(outputs).view(q.shape) if outputs else torch.empty_like(q)


def _attend_one(query: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    """``query [kv heads, group, head_dim]`` over ``k, v [kv heads, length, head_dim]``."""
    if query.dtype != torch.float32 or k.shape[1] > _SHORT_CONTEXT:
        attended = functional.scaled_dot_product_attention(query[None], k[None], v[None], scale=softmax_scale)
        return attended[0]
    scores = torch.bmm(query * softmax_scale, k.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), v)


def _padded(group: int) -> int:
    """Rows of a product for so many query heads: MKL multiplies 4 in two thirds of the time that it takes for 3."""
    return 4 if group == 3 else group


def _attend_together(q: Tensor, k_cache: Tensor, v_cache: Tensor, together: Together, softmax_scale: float) -> Tensor:
    """All sequences at once: a batched product over gathered K, and sums of V's rows where they lie.

    A weighted sum of rows that a list names is what recommendation models do with their tables, and FBGEMM, which torch
    has for them, does it at the speed of memory: 16 sequences of 270 tokens (9 heads on 3, of 64) take 0.26 ms so, and
    0.45 ms by gathering V and a product.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    # The query heads of a kv head are the rows of one product: nothing is repeated.
    together.heads.copy_(q.view(together.heads.shape))
    torch.index_select(k_cache.view(-1, head_dim), 0, together.rows, out=together.gathered)
    k = together.gathered.view(together.queries.shape[0], -1, head_dim)
    scores = torch.baddbmm(together.mask, together.queries, k.transpose(1, 2), alpha=softmax_scale)
    weights = scores[:, : q.shape[1] // num_kv_heads].softmax(-1)
    # `functional.embedding_bag` checks what is known here: 0 for sums, no gradient scaled by frequency, none sparse.
    attended = torch.embedding_bag(
        v_cache.view(-1, head_dim), together.heads_rows, together.heads_starts, False, 0, False, weights.view(-1)
    )[0]
    return attended.view(q.shape)


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
    for row, span in enumerate(_spans(block_tables, context_lens.tolist(), k_cache.shape[1])):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        k, v = _sequence_kv(k_cache, span), _sequence_kv(v_cache, span)
        cached = span.length - (end - begin)
        mask = None
        if cached:
            mask = torch.arange(span.length) <= torch.arange(cached, span.length)[:, None]
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
