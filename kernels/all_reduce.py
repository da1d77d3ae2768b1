"""All-reduce over several GPUs without a ring: each rank sends to all others, and adds the words that it receives.

Every 8 bytes that cross NVLink carry 4 bytes of data and the number of the sum they belong to. So a rank that reads the
expected number has the data as well. 8-byte stores are never torn, so there is no fence and no barrier. This is NCCL's
LL protocol (Hu et al. 2025, "Demystifying NCCL") without the ring. In a ring, hops and flags dominate the cost of a
decode step's small sums.

In one shot, every rank receives all words of all other ranks. In two shots, it receives the words of its own slice (1 /
N of the whole, with N ranks), and sends the slice's sum to the others. That is a second hop, but only 2 / N of the
bytes. One shot is therefore used for the smallest sums and for two ranks.

Grid: words / WORDS, in two shots words / N / WORDS. Tile: WORDS words of 4 bytes. For each word, a rank sends 8 (N - 1)
bytes over NVLink in one shot, 16 (N - 1) / N in two. It reads as many bytes from its inbox, and moves 8 for x.

Every rank's *inbox* is the memory to which the other ranks write. It has an area for each source rank (in two shots,
also for each shot) and each of two turns. Sums use the turns alternately. A turn's area is free again as soon as a rank
has received the next sum from all others, because each rank begins that sum only after reading this one. Each program
counts the sums on the device, so a launch can be replayed from a CUDA graph. Sums are formed in float32 in the order of
ranks, bitwise the same on each. A waiting rank also polls `Exchange.stop`: a write from another stream ends the wait,
and the sum is then invalid.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import cdiv
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched

WORDS = 512  # of 4 bytes, per program
_TURNS = 2
_LINE = 32  # words, 128 bytes
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Exchange:
    """The memory through which the kernels of all ranks exchange words.

    Every rank must launch the same sums in the same order.
    """

    rank: int
    inboxes: Tensor  # [ranks] int64, address of each rank's inbox: `inbox_words` int64 words, initially zero
    sums: Tensor  # [capacity / WORDS] int32, number of finished sums per program, initially zero
    stop: Tensor  # [1] int32: nonzero ends all waiting
    shots: int = 1  # 1 or 2

    @property
    def capacity(self) -> int:
        """Maximum number of 4-byte words in one sum. With two shots, in one rank's slice of a sum."""
        return self.sums.shape[0] * WORDS

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of one sum."""
        return 4 * self.capacity * (1 if self.shots == 1 else self.inboxes.numel())

    def takes(self, x: Tensor) -> bool:
        """Return whether `all_reduce` supports ``x``: its dtype, its layout, and its size in whole words."""
        size = x.numel() * x.itemsize
        return x.dtype in _DTYPES and x.is_contiguous() and size % 4 == 0 and 0 < size <= self.most_bytes


def inbox_words(ranks: int, capacity: int, shots: int = 1) -> int:
    """Return the number of int64 words of each rank's inbox.

    ``capacity`` is a multiple of WORDS: the maximum number of 4-byte words in a sum (one shot) or in a slice (two
    shots).
    """
    return shots * _TURNS * ranks * capacity


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
def _packed(low, high, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = (_half_word(low, DTYPE) & 0xFFFF) | (_half_word(high, DTYPE) << 16)
    return words


@triton.jit
def _inbox(inboxes_ptr, rank):
    return tl.load(inboxes_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _flagged(words, number):
    return (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _arrived(places, number, mask, stop_ptr):
    """Wait until all words at ``places`` in the inbox belong to sum ``number``. Return the words' data."""
    got = tl.load(places, mask=mask, other=0, volatile=True)
    here = tl.min(((got >> 32 == number.to(tl.int64)) | (mask == 0)).to(tl.int32), axis=0)
    while here == 0:
        got = tl.load(places, mask=mask, other=0, volatile=True)
        here = tl.min(((got >> 32 == number.to(tl.int64)) | (mask == 0)).to(tl.int32), axis=0)
        here = here | tl.load(stop_ptr, volatile=True)
    return got.to(tl.int32)


@triton.jit
def _summed(
    own, inbox, turn, offsets, number, mask, stop_ptr, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, SHOTS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Add this rank's words and those of the other ranks as they arrive, in the order of ranks.

    Returns two tensors ``[WORDS]`` float32: the sums of the words' low 16-bit elements, and those of their high
    elements. A float32 word is a single element, so the second tensor is zero.
    """
    low = tl.zeros([WORDS], tl.float32)
    high = tl.zeros([WORDS], tl.float32)
    for source in tl.static_range(RANKS):
        words = own
        if source != RANK:
            words = _arrived(inbox + SHOTS * (turn + source).to(tl.int64) * capacity + offsets, number, mask, stop_ptr)
        low += _low(words, DTYPE)
        if tl.float32 != DTYPE:
            high += _high(words, DTYPE)
    return low, high


@launched
@triton.jit
def _all_reduce_kernel(
    x_ptr, inboxes_ptr, sums_ptr, stop_ptr, num_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offsets = program * WORDS + tl.arange(0, WORDS)
    mask = offsets < num_words
    wait_for_inputs(PDL)
    number = tl.load(sums_ptr + program) + 1  # number of this sum; it may wrap around after 2^32
    turn = (number & 1) * RANKS
    own = tl.load(x_ptr + offsets, mask=mask, other=0)
    flagged = _flagged(own, number)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_inbox(inboxes_ptr, peer) + (turn + RANK).to(tl.int64) * capacity + offsets, flagged, mask=mask)
    inbox = _inbox(inboxes_ptr, RANK)
    low, high = _summed(
        own, inbox, turn, offsets, number, mask, stop_ptr, capacity, RANK, RANKS, 1, DTYPE, WORDS,
    )  # fmt: skip
    # Only after the first wait: a late warp must not read the next sum's number as the number of this sum.
    tl.store(sums_ptr + program, number)
    tl.store(x_ptr + offsets, _packed(low, high, DTYPE), mask=mask)


@launched
@triton.jit
def _all_reduce_in_two_kernel(
    x_ptr, inboxes_ptr, sums_ptr, stop_ptr, num_words, slice_words, capacity,
    RANK: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offsets = program * WORDS + tl.arange(0, WORDS)  # in each slice
    wait_for_inputs(PDL)
    number = tl.load(sums_ptr + program) + 1
    turn = (number & 1) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            mask = (offsets < slice_words) & (peer * slice_words + offsets < num_words)
            words = tl.load(x_ptr + peer * slice_words + offsets, mask=mask, other=0)
            places = _inbox(inboxes_ptr, peer) + 2 * (turn + RANK).to(tl.int64) * capacity + offsets
            tl.store(places, _flagged(words, number), mask=mask)
    inbox = _inbox(inboxes_ptr, RANK)
    mask = (offsets < slice_words) & (RANK * slice_words + offsets < num_words)
    own = tl.load(x_ptr + RANK * slice_words + offsets, mask=mask, other=0)
    low, high = _summed(
        own, inbox, turn, offsets, number, mask, stop_ptr, capacity, RANK, RANKS, 2, DTYPE, WORDS,
    )  # fmt: skip
    total = _packed(low, high, DTYPE)
    flagged = _flagged(total, number)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            places = _inbox(inboxes_ptr, peer) + (2 * (turn + RANK) + 1).to(tl.int64) * capacity + offsets
            tl.store(places, flagged, mask=mask)
    tl.store(x_ptr + RANK * slice_words + offsets, total, mask=mask)
    for source in tl.static_range(RANKS):
        if source != RANK:
            mask = (offsets < slice_words) & (source * slice_words + offsets < num_words)
            places = inbox + (2 * (turn + source) + 1).to(tl.int64) * capacity + offsets
            tl.store(x_ptr + source * slice_words + offsets, _arrived(places, number, mask, stop_ptr), mask=mask)
    tl.store(sums_ptr + program, number)


def all_reduce(x: Tensor, exchange: Exchange) -> Tensor:
    """Add ``x`` over all ranks, in place: see `reference.all_reduce`.

    Raises ValueError unless ``exchange.takes(x)``.
    """
    if not exchange.takes(x):
        taken = "one shot takes" if exchange.shots == 1 else "two shots takes slices of"
        raise ValueError(f"a sum in {taken} up to {exchange.capacity} words, contiguous, not {tuple(x.shape)}")
    words, ranks = x.view(-1).view(torch.int32), exchange.inboxes.numel()
    kernel, sizes = _all_reduce_kernel, [words.numel()]
    if exchange.shots == 2:
        kernel, sizes = _all_reduce_in_two_kernel, [words.numel(), slice_of(words.numel(), ranks)]
    kernel[(cdiv(sizes[-1], WORDS),)](
        words, exchange.inboxes, exchange.sums, exchange.stop, *sizes, exchange.capacity,
        RANK=exchange.rank, RANKS=ranks, DTYPE=_DTYPES[x.dtype], WORDS=WORDS, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return x


def slice_of(num_words: int, ranks: int) -> int:
    """Return the number of words in each rank's slice, rounded up to whole cache lines.

    The last slices may be shorter.
    """
    return cdiv(cdiv(num_words, ranks), _LINE) * _LINE
