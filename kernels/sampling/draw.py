"""Draw one token per row from logits, without sorting them.

Tokens of a row have one order: larger logit first, lower id among equals. top-k, top-p and min-p each keep the first
tokens of this order and cut the others, so a logit and an id describe a cut. The draw is Gumbel-max (Gumbel 1954): the
kept token with the largest ``logit / temperature + noise``, where the noise is a hash of (seed, position, token id).
With E = -log(1 - uniform), that is the token with the largest score ``exp(logit / temperature) / E``, which saves a
logarithm per token.

There are two launches. The first is the scan, grid (rows, pieces of the vocabulary): see `kernels.sampling.scan`. The
second is ``_draw_kernel``, grid (rows). It merges the pieces, and continues depending on the row:

- no cut: the token with the best score of all pieces is the draw.
- top-k: the largest logits are collected on chip (`kernels.sampling.top_k`), and cut there by number and probability.
- no top-k: the token with the best score is the draw if top-p and min-p keep it. Otherwise this token and all tokens
  after it are cut, and the best remaining token is tried. The draw is the same as after a search for the cut, and takes
  about one pass (rejection with a rising pivot, as in FlashInfer's sampler, on fixed noise).
- top-k too large, or too many equal logits: bisections over the whole row, which are slower but exact.

Bytes: the logits once, at memory speed; the second kernel reads from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import SamplingInputs
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.sampling.scan import PIECE, check_logits, exponential, ordered, read_parts, scan
from minillm.kernels.sampling.top_k import collect, is_above, keep_top, row_above, row_top_k


@triton.jit
def _row_best(row_ptr, vocab, key, token, least, anchor, temperature, seed, position, TILE: tl.constexpr):
    """Return the token with the best score in the whole row, among tokens above ``(key, token)`` that min-p keeps."""
    best = tl.full([TILE], -1.0, tl.float32)
    best_ids = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=3):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        scaled = (x - anchor) / temperature
        kept = (ids < vocab) & is_above(ordered(x), ids, key, token) & (scaled >= least)
        scores = tl.where(kept, tl.exp(scaled) / exponential(seed, position, ids), -1.0)
        better = scores > best
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_ids, vocab - 1), axis=0)


@launched
@triton.jit
def _draw_kernel(
    tokens_ptr, logprobs_ptr, groups_ptr, values_ptr, ids_ptr, parts_ptr, maxima_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab, num_pieces, num_groups,
    PIECES_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, ROW_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    part_ptr, is_piece, piece_maxima, maximum, anchor, total_at_one = read_parts(
        parts_ptr, row, num_pieces, PIECES_TILE, PARTS
    )
    temperature = tl.load(temperature_ptr + row)
    piece_ids = tl.load(part_ptr + 1, mask=is_piece, other=0.0).to(tl.int32)
    token = tl.min(tl.where(is_piece & (piece_maxima == maximum), piece_ids, vocab - 1), axis=0)
    # A row with NaN has no order, and searching a cut in it might never end. Its log-probability is NaN.
    if (temperature > 0) & (total_at_one == total_at_one):
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab).to(tl.int32)
        top_p = tl.load(top_p_ptr + row)
        least = tl.log(tl.load(min_p_ptr + row))
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        high = ordered(maximum)
        low = ordered(maximum * 0.0 - float("inf"))
        drawn = 0
        total = 0.0
        if top_k == 0:
            piece_weights = tl.exp((piece_maxima - anchor) / temperature)
            total = tl.sum(tl.load(part_ptr + 3, mask=is_piece, other=0.0) * piece_weights, axis=0)
            scores = tl.load(part_ptr + 4, mask=is_piece, other=0.0) * piece_weights
            scores = tl.where(is_piece, scores, -1.0)
            score_ids = tl.load(part_ptr + 5, mask=is_piece, other=0.0).to(tl.int32)
            token = tl.min(tl.where(scores == tl.max(scores, axis=0), score_ids, vocab - 1), axis=0)
        else:
            threshold, found = collect(
                row, row_ptr, maxima_ptr, groups_ptr, values_ptr, ids_ptr, vocab, num_groups, top_k, high,
                GROUPS_TILE, GROUP, CANDIDATES,
            )  # fmt: skip
            flat = tl.arange(0, CANDIDATES)
            if (found <= CANDIDATES) & (top_k <= num_groups):
                drawn = 1
                held = flat < found
                x = tl.load(values_ptr + row * CANDIDATES + flat, mask=held, other=float("-inf"))
                ids = tl.load(ids_ptr + row * CANDIDATES + flat, mask=held, other=vocab)
                keys = ordered(x)
                kept = keep_top(keys, held, top_k, threshold, low, high)
                scaled = (x - anchor) / temperature
                weights = tl.where(kept, tl.exp(scaled), 0.0)
                total = tl.sum(weights, axis=0)
                scores = weights / exponential(seed, position, ids)
                scores = tl.where(kept & (scaled >= least), scores, -1.0)
                accepted = 0
                while accepted == 0:
                    token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, vocab), axis=0)
                    key = tl.max(tl.where(ids == token, keys, low), axis=0)
                    above = is_above(keys, ids, key, token)
                    if (top_p >= 1.0) | (tl.sum(tl.where(above, weights, 0.0), axis=0) < top_p * total):
                        accepted = 1
                    elif tl.sum((above & kept).to(tl.int32), axis=0) == 0:
                        accepted = 1  # the most probable token is always kept
                    scores = tl.where(above, scores, -1.0)
            else:
                key, limit = row_top_k(row_ptr, vocab, top_k, low, high, ROW_TILE)
                _count, total = row_above(row_ptr, vocab, key, limit, anchor, temperature, ROW_TILE)
                token = _row_best(row_ptr, vocab, key, limit, least, anchor, temperature, seed, position, ROW_TILE)
        while drawn == 0:
            x = tl.load(row_ptr + token).to(tl.float32)
            key = ordered(x)
            enough = (x - anchor) / temperature >= least
            if enough & (top_p >= 1.0):
                drawn = 1
            else:
                count, mass = row_above(row_ptr, vocab, key, token, anchor, temperature, ROW_TILE)
                if (count == 0) | (enough & (mass < top_p * total)):
                    drawn = 1
                else:
                    token = _row_best(row_ptr, vocab, key, token, least, anchor, temperature, seed, position, ROW_TILE)
    token = tl.minimum(token, vocab - 1)  # a row of NaN has no largest
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.load(row_ptr + token).to(tl.float32) - (anchor + tl.log(total_at_one)))


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Compute `reference.sample`, for the same arguments as `sample_with_logprobs`."""
    return sample_with_logprobs(logits, inputs)[0]


def sample_with_logprobs(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """Compute `reference.sample_with_logprobs`. Raises ValueError for a wrong shape or layout.

    ``logits`` are float32, bfloat16 or float16, and their rows may be strided. vocab must be below 2^24. ``inputs`` are
    contiguous.
    """
    rows, vocab = check_logits(logits)
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor.shape != (rows,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous [{rows}], not {tuple(tensor.shape)}")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        scratch = scan(logits, inputs)
        _draw_kernel[(rows,)](
            tokens, logprobs, *scratch.tensors, logits, *inputs, logits.stride(0), vocab, *scratch.counts,
            **scratch.tiles, ROW_TILE=PIECE, num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip
    return tokens, logprobs


@launched
@triton.jit
def _log_probability_kernel(
    logprobs_ptr, parts_ptr, logits_ptr, tokens_ptr, row_stride, num_pieces,
    PIECES_TILE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    _ptr, _is_piece, _maxima, _maximum, anchor, total = read_parts(parts_ptr, row, num_pieces, PIECES_TILE, PARTS)
    x = tl.load(logits_ptr + row * row_stride + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(logprobs_ptr + row, x - (anchor + tl.log(total)))


def log_probabilities(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Compute `reference.log_probabilities`, bitwise the same as `sample_with_logprobs` for logits of one dtype.

    This launches the scan, then a kernel with grid (rows), which merges the scan's results of the row's pieces.
    """
    rows, _vocab = check_logits(logits)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        scratch = scan(logits, None)
        _log_probability_kernel[(rows,)](
            logprobs, scratch.parts, logits, token_ids, logits.stride(0), scratch.counts[0],
            PIECES_TILE=scratch.tiles["PIECES_TILE"], PARTS=scratch.tiles["PARTS"],
            num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip
    return logprobs
