"""One pass over logits: the first step of the sampler and of the search for the most probable tokens.

``_scan_kernel``, grid (rows, pieces of the vocabulary), tile: a piece. For each piece it stores the largest logit with
its id, the sum of ``exp`` at temperature 1 (for log-probabilities) and at the row's own temperature, the best score of
a draw, and the maximum of every 32 adjacent logits. Bytes: the logits once, at memory speed. A score is ``exp(logit /
temperature) / E`` with E = -log(1 - uniform): see `minillm.kernels.sampling.draw`. The uniform random numbers are those
of `reference.uniform`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import SamplingInputs, cdiv, next_power_of_2
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched

PIECE = 4096  # logits per program of the scan
_GROUP = 32  # adjacent logits that share one maximum
_CANDIDATES = 2048  # maximum logits of a row that the next kernel collects
_NO_INPUTS = (None,) * 4
_PARTS = 6  # values per piece: maximum, its id, exp-sum at 1, exp-sum at the temperature, best score, its id


@triton.jit
def _mix64(x):
    """Apply SplitMix64's finalizer; see `reference._mix64`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def exponential(seed, position, ids):
    """Return -log(1 - u), where u are the random numbers of `reference.uniform` for one row's (seed, position) and a
    tile of token ids.
    """
    key = _mix64(_mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64))
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32) * 0x9E3779B9 + low
    x = _mix32(x, 0x21F0AAAD, 0xD35A2D97) ^ high
    x = _mix32(x, 0x7FEB352D, 0x846CA68B) & 0x7FFFFFFF
    uniform = (x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.99999994)
    # 1 - u is rounded. For small u, which decide the draw, the series is exact.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    return tl.where(uniform < 0.004, series, -tl.log(1.0 - uniform))


@triton.jit
def ordered(x):
    """Return int32 keys that sort like the floats ``x``, for bisection. Both zeros have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _store_group_maxima(
    maxima_ptr, x, row, piece, num_groups, PIECE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    groups = piece * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP)
    group_maxima = tl.max(tl.reshape(x, [PIECE // GROUP, GROUP]), axis=1)
    tl.store(maxima_ptr + row * num_groups + groups, group_maxima, mask=groups < num_groups)


@launched
@triton.jit
def _scan_kernel(
    parts_ptr, maxima_ptr, logits_ptr, temperature_ptr, top_k_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab, num_pieces, num_groups,
    DRAWS: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    maximum, where = tl.max(x, axis=0, return_indices=True)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    out = parts_ptr + (row * num_pieces + piece) * PARTS
    tl.store(out, maximum)
    tl.store(out + 1, (piece * PIECE + where).to(tl.float32))
    tl.store(out + 2, tl.sum(tl.exp(x - anchor), axis=0))
    if not DRAWS:
        _store_group_maxima(maxima_ptr, x, row, piece, num_groups, PIECE, GROUP)
    else:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            weights = tl.exp((x - anchor) / temperature)
            tl.store(out + 3, tl.sum(weights, axis=0))
            if tl.load(top_k_ptr + row) > 0:
                _store_group_maxima(maxima_ptr, x, row, piece, num_groups, PIECE, GROUP)
            else:
                scores = weights / exponential(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
                # min-p needs the whole row's maximum, so it is applied when the pieces are merged.
                best, where = tl.max(scores, axis=0, return_indices=True)
                tl.store(out + 4, best)
                tl.store(out + 5, (piece * PIECE + where).to(tl.float32))


@triton.jit
def read_parts(parts_ptr, row, num_pieces, PIECES_TILE: tl.constexpr, PARTS: tl.constexpr):
    """Read and merge the scan's results for all pieces of a row.

    Returns: addresses of the pieces' results; the mask of existing pieces; the pieces' maxima; the row's maximum; an
    anchor; the sum of ``exp(logit - anchor)`` over the row. The anchor is the row's maximum, but 0 if that is -inf.
    """
    pieces = tl.arange(0, PIECES_TILE)
    is_piece = pieces < num_pieces
    part_ptr = parts_ptr + (row * num_pieces + pieces) * PARTS
    maxima = tl.load(part_ptr, mask=is_piece, other=float("-inf"))
    sums = tl.load(part_ptr + 2, mask=is_piece, other=0.0)
    maximum = tl.max(maxima, axis=0)
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    return part_ptr, is_piece, maxima, maximum, anchor, tl.sum(sums * tl.exp(maxima - anchor), axis=0)


class Scratch(NamedTuple):
    """The results of the scan, and memory for the next kernel's candidates."""

    tensors: tuple[Tensor, ...]  # group ids, candidates' values and ids, results of the pieces, maxima of the groups
    counts: tuple[int, int]  # number of pieces, number of groups
    tiles: dict[str, int]  # compile-time constants of the next kernel

    @property
    def parts(self) -> Tensor:
        return self.tensors[3]


def scan(logits: Tensor, inputs: SamplingInputs | None) -> Scratch:
    """Launch the scan of ``logits [rows, vocab]``. Without ``inputs``, it draws no tokens.

    It then computes only the results that `top_k.top_log_probabilities` and `draw.log_probabilities` need.
    """
    rows, vocab = logits.shape
    num_pieces, num_groups = counts = cdiv(vocab, PIECE), cdiv(vocab, _GROUP)
    groups_tile = next_power_of_2(num_groups)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    parts, maxima = empty(num_pieces * _PARTS, torch.float32), empty(num_groups, torch.float32)
    _scan_kernel[(rows, num_pieces)](
        parts, maxima, logits, *(_NO_INPUTS if inputs is None else _read(inputs)),
        logits.stride(0), vocab, num_pieces, num_groups,
        DRAWS=inputs is not None, PIECE=PIECE, GROUP=_GROUP, PARTS=_PARTS, num_warps=8, **pdl_options(logits.device),
    )  # fmt: skip
    candidates = empty(_CANDIDATES, torch.float32), empty(_CANDIDATES, torch.int32)
    tiles = {"PIECES_TILE": next_power_of_2(num_pieces), "GROUPS_TILE": groups_tile, "GROUP": _GROUP}
    tiles |= {"PARTS": _PARTS, "CANDIDATES": _CANDIDATES}
    return Scratch((empty(groups_tile, torch.int32), *candidates, parts, maxima), counts, tiles)


def _read(inputs: SamplingInputs) -> tuple[Tensor, ...]:
    return inputs.temperature, inputs.top_k, inputs.seeds, inputs.positions


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Return the shape of ``logits``. Raises ValueError if the scan cannot read them."""
    rows, vocab = logits.shape
    if not logits.is_floating_point() or logits.stride(1) != 1 or vocab >= 1 << 24:
        taken = "floating point [rows, vocab < 2^24], rows contiguous"
        raise ValueError(f"logits must be {taken}, not {logits.dtype} {tuple(logits.shape)}")
    return rows, vocab
