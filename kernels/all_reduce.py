"""The sum of what several GPUs hold, in one shot: each writes its part to all the others, each adds up what arrived.

For the small sums of a decode step (8 kB at batch 1) the hops of a ring and its separate flags are all the cost. Here
there is one hop and no flag apart: every 8 bytes that cross NVLink carry 4 bytes of data and the number of this sum, so
whoever reads the expected number has the data, too. 8-byte stores are never torn, hence there is no fence and no
barrier, and a sum takes little more than the way of one store. This is the idea of NCCL's LL protocol (Hu et al. 2025,
"Demystifying NCCL", describe it) without the ring.

Grid: words / WORDS. Tile: WORDS words of 4 bytes (two bfloat16 or float16 numbers, or one float32). Bytes: on each rank
8 a word to every other rank and back from its own inbox, 8 more for x; N - 1 times that crosses NVLink, so from some
megabytes on a ring is faster.

Every rank's *inbox* has a place for each source and each of two turns. A turn is free again as soon as a rank has heard
of the next sum from all others: they begin it only when they have read this one. Which sum it is, each program counts
on the device, so a launch can be replayed from a graph. Sums are formed in float32 in the order of ranks: the same bits
on each.

A rank that waits looks at `Exchange.stop`, too: written from another stream, it ends the wait; the sum is worthless.

Reference: `kernels.reference.all_reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compat import pdl_options, wait_for_inputs

WORDS = 512  # of 4 bytes, a program
_TURNS = 2
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Exchange:
    """What one rank's kernels need to know of all ranks. Every rank launches the same sums in the same order."""

    rank: int
    inboxes: Tensor  # [ranks] int64, the address of each rank's inbox: `inbox_words` int64 words, zero at first
    sums: Tensor  # [capacity / WORDS] int32, how many sums each program has done: zero at first
    stop: Tensor  # [1] int32: not 0 ends all waiting

    @property
    def capacity(self) -> int:
        """The most words of 4 bytes in one sum."""
        return self.sums.shape[0] * WORDS

    def takes(self, x: Tensor) -> bool:
        """Whether `all_reduce` can add up tensors like ``x``."""
        size = x.numel() * x.itemsize
        return x.dtype in _DTYPES and x.is_contiguous() and size % 4 == 0 and 0 < size <= 4 * self.capacity


def inbox_words(ranks: int, capacity: int) -> int:
    """The int64 words of an inbox for sums of up to ``capacity`` words, a multiple of `WORDS`."""
    return _TURNS * ranks * capacity


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    if tl.bfloat16 == DTYPE:
        return (words << 16).to(tl.float32, bitcast=True)
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return ((words >> 16) << 16).to(tl.float32, bitcast=True)
    return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _half_word(values, DTYPE: tl.constexpr):
    return values.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _all_reduce_kernel(
    x_ptr, inboxes_ptr, sums_ptr, stop_ptr, num_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offsets = program * WORDS + tl.arange(0, WORDS)
    mask = offsets < num_words
    wait_for_inputs(PDL)
    number = tl.load(sums_ptr + program) + 1  # of this sum; after 2^32 it begins again, which harms nothing
    flag = number.to(tl.int64) << 32
    turn = (number & 1) * RANKS
    own = tl.load(x_ptr + offsets, mask=mask, other=0)
    flagged = flag | (own.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(inboxes_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.store(theirs + (turn + RANK).to(tl.int64) * capacity + offsets, flagged, mask=mask)
    inbox = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([WORDS], tl.float32)
    high = tl.zeros([WORDS], tl.float32)
    for source in tl.static_range(RANKS):
        words = own
        if source != RANK:
            place = inbox + (turn + source).to(tl.int64) * capacity + offsets
            got = tl.load(place, mask=mask, other=0, volatile=True)
            here = tl.min(((got >> 32 == number.to(tl.int64)) | (offsets >= num_words)).to(tl.int32), axis=0)
            while here == 0:
                got = tl.load(place, mask=mask, other=0, volatile=True)
                here = tl.min(((got >> 32 == number.to(tl.int64)) | (offsets >= num_words)).to(tl.int32), axis=0)
                here = here | tl.load(stop_ptr, volatile=True)
            words = got.to(tl.int32)
        low += _low(words, DTYPE)
        if tl.float32 != DTYPE:
            high += _high(words, DTYPE)
    # Only here: in front of the first wait, a warp that is late would read the number of the next sum.
    tl.store(sums_ptr + program, number)
    if tl.float32 == DTYPE:
        total = low.to(tl.int32, bitcast=True)
    else:
        total = (_half_word(low, DTYPE) & 0xFFFF) | (_half_word(high, DTYPE) << 16)
    tl.store(x_ptr + offsets, total, mask=mask)


def all_reduce(x: Tensor, exchange: Exchange) -> Tensor:
    """The sum of all ranks' ``x``, in place: see `reference.all_reduce`.

    Raises:
        ValueError: not a tensor that ``exchange`` takes.
    """
    if not exchange.takes(x):
        raise ValueError(f"a sum in one shot takes up to {exchange.capacity} words, contiguous, not {tuple(x.shape)}")
    words = x.view(-1).view(torch.int32)
    _all_reduce_kernel[(triton.cdiv(words.numel(), WORDS),)](
        words, exchange.inboxes, exchange.sums, exchange.stop, words.numel(), exchange.capacity,
        RANK=exchange.rank, RANKS=exchange.inboxes.numel(), DTYPE=_DTYPES[x.dtype], WORDS=WORDS,
        num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return x
