"""Every op in plain PyTorch: the specification that the fast versions are tested against.

It is written for readability, and also runs in float64: arithmetic happens in the wider of float32 and the input's
dtype. `minillm.kernels.arguments` defines arguments that consist of several tensors, with their shapes.
`minillm.kernels.decode_state.reference` specifies the ops on device state.
"""

from functools import reduce

import torch
from torch import Tensor

from minillm.kernels.arguments import HeadNorms, LayerCache, Pages, RotaryInputs, SamplingInputs
from minillm.kernels.attention.plan import WorkList


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019).

    The order of casts is Llama's: normalize in float32, cast back to the input's dtype, then multiply by the weight.
    """
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (Shazeer 2020); gate and up are the halves of ``gate_up [num_tokens, 2 * size]``.

    ``silu(gate)`` is rounded to the input's dtype before the multiplication.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(_wide(gate)).to(gate_up.dtype) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` like `silu_mul`, with the tanh approximation of GELU (Hendrycks & Gimpel 2016)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(_wide(gate), approximate="tanh").to(gate_up.dtype) * up


def norm_add(x: Tensor, norm_weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Compute ``residual += rms_norm(x)``, in place."""
    return residual.add_(rms_norm(x, norm_weight, eps))


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rms_norm(x) @ weight.T + bias``."""
    return torch.nn.functional.linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gated_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return ``silu(gate) * up`` with ``gate, up = rms_norm(x) @ weight.T + bias``: SwiGLU up to its last matmul.

    The rows of gate come first in ``weight``. Without ``norm_weight``, x is not normalized. `LinearWeight.gate` of the
    fast ops replaces `silu_mul` with `gelu_mul`.
    """
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    return silu_mul(torch.nn.functional.linear(normed, weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Compute ``residual += x @ weight.T + bias``, in place."""
    return residual.add_(torch.nn.functional.linear(x, weight, bias))


def mlp(
    x: Tensor, norm_weight: Tensor | None, eps: float, gate_up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None], residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute ``residual += down(norm_gated_linear(x))`` in place. Without a residual, return the matmul's result.

    ``gate_up`` and ``down`` are pairs of a weight and its bias.
    """
    gated = norm_gated_linear(x, norm_weight, eps, *gate_up)
    return torch.nn.functional.linear(gated, *down) if residual is None else linear_add(gated, *down, residual)


def all_reduce(parts: list[Tensor]) -> Tensor:
    """Return the sum of all ranks' tensors, ``parts``, which have one shape and dtype.

    The tensors are added in the order of ranks in float32 (or float64), and the sum is rounded once at the end.
    """
    return reduce(torch.add, map(_wide, parts)).to(parts[0].dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * cos.shape[1]`` dimensions of ``x [num_tokens, heads, head_dim]`` (Su et al. 2021)."""
    half = cos.shape[-1]
    wide, cos, sin = _wide(x), cos[:, None], sin[:, None]
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x [..., dim]`` to int8, with one float32 scale for each row: ``values * scale`` approximates ``x``.

    The scale ``[...]`` is the row's largest magnitude times 1/127. Values are rounded to nearest, ties to even, so the
    error is at most half a scale. A row of zeros has scale 0. A row with NaN or infinity has scale NaN, and its values
    are 0.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    finite = largest.isfinite()
    scales = torch.where(finite, largest * (1 / 127), float("nan"))
    levels = (wide / torch.where(scales > 0, scales, 1.0)[..., None]).round()
    return torch.where(finite[..., None], levels, 0.0).to(torch.int8), scales


def write_rows(cache: Tensor, scales: Tensor | None, slots: Tensor, rows: Tensor) -> None:
    """Store ``rows [n, heads, dim]`` in ``slots [n]`` of one layer's K or V. An 8-bit cache stores them quantized."""
    if scales is not None:
        rows, factors = quantize_rows(rows)
        block_size = cache.shape[1]
        scales[slots // block_size, :, slots % block_size] = factors
    cache.flatten(0, 1).index_copy_(0, slots, rows)


def rotary_write_kv(
    q: Tensor, k: Tensor, v: Tensor, rope: RotaryInputs, cache: LayerCache, norms: HeadNorms | None = None
) -> None:
    """Rotate ``q`` in place. Write rotated ``k``, and ``v``, to the tokens' slots. ``k`` is scratch: it may change.

    An 8-bit cache stores `quantize_rows` of the values that a cache of q's dtype would store.

    Args:
        q, k, v: ``[num_tokens, heads, head_dim]``; they may be strided views of one fused projection.
        norms: if given, apply `rms_norm` to each head of q and k (Henry et al. 2020), before or after they are rotated.
    """
    cos, sin, slots = rope
    if norms is not None and not norms.after_rotary:
        q.copy_(rms_norm(q, norms.q, norms.eps))
        k = rms_norm(k, norms.k, norms.eps)
    q.copy_(rotary(q, cos, sin))
    k = rotary(k, cos, sin)
    if norms is not None and norms.after_rotary:
        q.copy_(rms_norm(q, norms.q, norms.eps))
        k = rms_norm(k, norms.k, norms.eps)
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    write_rows(cache.k, cache.k_scales, slots, k)
    write_rows(cache.v, cache.v_scales, slots, v)


def _context(pages: Pages, seq: int, length: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a sequence's first ``length`` tokens, in order, each ``[length, num_kv_heads, head_dim]``."""
    blocks = pages.tables[seq, : -(-length // pages.k.shape[1])].long()
    k, v = pages.k[blocks], pages.v[blocks]  # [blocks, block_size, num_kv_heads, head_dim]
    if pages.k_scales is not None and pages.v_scales is not None:
        k = k * pages.k_scales[blocks].transpose(1, 2)[..., None]
        v = v * pages.v_scales[blocks].transpose(1, 2)[..., None]
    return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def _attend(q: Tensor, pages: Pages, seq: int, length: int, softmax_scale: float) -> Tensor:
    """Compute causal attention of a sequence's last tokens, ``q [n, heads, dim]``, over all its ``length`` tokens."""
    k, v = _context(pages, seq, length)  # [length, kv_heads, dim]
    group = q.shape[1] // k.shape[1]
    q, k, v = (_wide(t).transpose(0, 1) for t in (q, k, v))  # [heads, tokens, dim]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * softmax_scale
    positions = torch.arange(length, device=q.device)
    distances = positions[length - q.shape[1] :, None] - positions
    visible = (distances >= 0) & (distances < (pages.window or length))
    scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def paged_attention(q: Tensor, pages: Pages, softmax_scale: float) -> Tensor:
    """Compute decode attention: one query per sequence over its paged context (Kwon et al. 2023).

    Head ``h`` of ``q [num_seqs, num_heads, head_dim]`` reads kv head ``h // (num_heads / num_kv_heads)``. The result
    has q's shape, and is zero for an empty context. With a window, a query attends to the last ``window`` tokens of its
    context (Beltagy et al. 2020).
    """
    out = torch.zeros_like(q)
    for seq, length in enumerate(pages.lens.tolist()):
        if length:
            out[seq] = _attend(q[seq : seq + 1], pages, seq, length, softmax_scale)[0].to(q.dtype)
    return out


def attend_add(
    q: Tensor, pages: Pages, softmax_scale: float, o: tuple[Tensor, Tensor | None], residual: Tensor
) -> Tensor:
    """Compute ``residual += o(paged_attention(q, …))`` in place. ``o`` is a weight ``[out, heads * head_dim]`` and its
    bias.
    """
    return linear_add(paged_attention(q, pages, softmax_scale).flatten(1), *o, residual)


def prefix_attention(q: Tensor, pages: Pages, softmax_scale: float, work: WorkList) -> Tensor:
    """Compute `paged_attention` for sequences that share blocks. A kernel may read a shared block once for all of them.

    ``work`` holds a plan from `plan_attention` for the same block tables. Contexts may have grown since then.
    """
    return paged_attention(q, pages, softmax_scale)


def prefill_attention(q: Tensor, pages: Pages, cu_seqlens: Tensor, softmax_scale: float) -> Tensor:
    """Compute causal attention of prompt chunks over the paged cache, which already has the chunks' own K and V.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, the chunks packed one after another.
        cu_seqlens: ``[num_seqs + 1]`` int32, the starts of the chunks in ``q``. The chunk of sequence ``i`` has
            ``cu_seqlens[i + 1] - cu_seqlens[i]`` queries, the last one at position ``pages.lens[i] - 1``.
    """
    out = torch.zeros_like(q)
    starts = cu_seqlens.tolist()
    for seq, length in enumerate(pages.lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        if end > begin:
            out[begin:end] = _attend(q[begin:end], pages, seq, length, softmax_scale).to(q.dtype)
    return out


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks ``block_ids [n]`` int64 of one of the pool's tensors to ``staging [>= n, num_layers, 2, ...]``."""
    staging[: len(block_ids)] = kv_cache[:, :, block_ids].movedim(2, 0)


def scatter_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy ``staging`` back to the pool's blocks ``block_ids``: the inverse of `gather_blocks`."""
    kv_cache[:, :, block_ids] = staging[: len(block_ids)].movedim(0, 2).to(kv_cache.device)


def block_copy(kv_cache: Tensor, copies: Tensor) -> None:
    """Copy blocks within one of the pool's tensors, ``[num_layers, 2, num_blocks, ...]``, for copy-on-write.

    ``copies`` is ``[num_copies, 2]`` int64 (source, destination). A destination is in no other pair. The pair (-1, -1)
    copies nothing.
    """
    copies = copies[copies[:, 0] >= 0]
    kv_cache[:, :, copies[:, 1]] = kv_cache[:, :, copies[:, 0]]


# --- sampling ---------------------------------------------------------------------------------------------------------


def _as_signed(value: int, bits: int) -> int:
    """Reinterpret an unsigned integer of ``bits`` bits as signed."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix64(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014) to int64 values, with wrap-around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _as_signed(factor, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix32(x: Tensor, first: int, second: int) -> Tensor:
    """Apply an xorshift-multiply finalizer to int32 values (constants: Wellons, "hash-prospector", bias 0.17)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _as_signed(first, 32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _as_signed(second, 32)
    return x ^ ((x >> 16) & 0xFFFF)


def uniform(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return uniform random numbers in (0, 1), float32, each a pure function of (seed, position, id).

    No state is carried from draw to draw, so a sequence draws the same numbers alone, in any batch, preempted or not.
    Steps between numbers are finest near 0 (``2**-32``), where `gumbel` needs them. ``seeds`` and ``positions`` are
    ``[rows]`` int64, ``ids`` is int32 and broadcastable to ``[rows, n]``.
    """
    key = _mix64(_mix64(seeds + _as_signed(0x9E3779B97F4A7C15, 64)) ^ positions)
    low, high = key.view(torch.int32).view(-1, 2, 1).unbind(1)  # lower half first
    x = ids * _as_signed(0x9E3779B9, 32) + low
    x = _mix32(x, 0x21F0AAAD, 0xD35A2D97) ^ high
    x = _mix32(x, 0x7FEB352D, 0x846CA68B) & 0x7FFFFFFF
    return ((x.float() + 0.5) * 2.0**-31).clamp_(max=1 - 2.0**-24)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return standard Gumbel noise: ``argmax(logits + gumbel)`` draws from ``softmax(logits)`` (Gumbel 1954)."""
    return -torch.log(-torch.log1p(-uniform(seeds, positions, ids)))


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Draw one token id per row, ``[rows]`` int64. Apply temperature, top-k, top-p and min-p, in Hugging Face's order.

    Tokens are ordered by logit, larger first, then by id, lower first. Each filter keeps the first tokens of this
    order. top-k keeps exactly k tokens. Of these, top-p keeps the fewest tokens with enough probability together. min-p
    keeps each token with enough probability relative to the first token.

    Args:
        logits: ``[rows, vocab]`` float32; -inf marks a forbidden token, and at least one logit per row is finite.
        inputs: parameters of these rows. Temperature 0 takes the first token of the order. Seed and position determine
            the random numbers of the draw: see `uniform`.
    """
    temperature, top_k, top_p, min_p, seeds, positions = inputs
    drawn = temperature > 0
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    # Subtracting the maximum first avoids overflow at temperatures such as 1e-12.
    scaled = (values - values[:, :1]) / torch.where(drawn, temperature, 1.0)[:, None]
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = rank < torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    probabilities = scaled.masked_fill(~kept, float("-inf")).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    kept &= scaled >= torch.log(min_p)[:, None]
    score = (scaled + gumbel(seeds, positions, ids.to(torch.int32))).masked_fill(~kept, float("-inf"))
    choice = torch.where(drawn, score.argmax(-1), 0)
    return ids.gather(1, choice[:, None])[:, 0]


def sample_with_logprobs(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """Draw with `sample`. Also return the tokens' log-probabilities at temperature 1, ``[rows]`` float32.

    A log-probability is NaN if its row has a NaN.
    """
    tokens = sample(logits.float(), inputs)
    return tokens, log_probabilities(logits, tokens)


def log_probabilities(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return ``log_softmax(logits)[token]`` of each row, ``[rows]``, without storing the distribution. The result is
    NaN if any logit of the row is NaN.
    """
    wide = _wide(logits)
    return wide.gather(1, token_ids[:, None])[:, 0] - wide.logsumexp(-1)


def top_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and int64 ids of each row's ``count`` most probable tokens, both ``[rows, count]``.

    The best token is first. Equal tokens are in the order of their ids.
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :count] - logits.logsumexp(-1, keepdim=True), ids[:, :count]


def mask_logits(logits: Tensor, masks: Tensor, words: Tensor, out: Tensor) -> None:
    """Write ``logits [n, vocab]`` to ``out``, with -inf for forbidden tokens. NaN stays. ``out`` may be ``logits``.

    Args:
        masks: ``[n]`` int32, the index of each row's mask in ``words``; -1: all tokens are allowed.
        words: ``[masks, words]`` int32: token i is allowed if bit ``i % 32`` of word ``i // 32`` is 1.
    """
    vocab = logits.shape[1]
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    may_follow = bits.flatten(1)[masks.clamp(min=0).long(), :vocab].bool() | (masks < 0)[:, None]
    out.copy_(torch.where(may_follow | logits.isnan(), logits, float("-inf")))
