"""Steps of beam searches on the device: choose the continuations that survive, and update the beams' slots.

- ``choose_beams`` chooses each search's best continuations among the most probable tokens of its beams. It writes the
  survivors to the slots. Grid: (searches). Bytes: the candidates. Each program extracts its best candidate repeatedly;
  a 64-bit key has the log-probability, then the candidate's index, so that no two are equal.
- ``fork_rows`` copies the block table of a surviving beam to the slot of a dropped one, and lists the partly filled
  blocks to copy. Grid: (slots). Bytes: the tables of the beams that fork: 8 per block of context.

Slot -1 is padding, and so is a search of width 0: nothing is written for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import Field, SearchField, next_power_of_2, power_of_two
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched
from minillm.kernels.sampling.scan import ordered

_TABLE_TILE = 1024

_TOKEN = tl.constexpr(Field.TOKEN)
_POSITION = tl.constexpr(Field.POSITION)
_LOGPROB = tl.constexpr(Field.LOGPROB)
_RANK = tl.constexpr(Field.RANK)
_TABLE = tl.constexpr(Field.TABLE)
_WIDTH = tl.constexpr(SearchField.WIDTH)
_KEEP = tl.constexpr(SearchField.KEEP)
_ENDS = tl.constexpr(SearchField.ENDS)
_MOST_ENDS = tl.constexpr(SearchField.MOST_ENDS)
_SEARCH_WORDS = tl.constexpr(SearchField.WORDS)


@launched
@triton.jit
def _choose_beams_kernel(
    words_ptr, rows_ptr, searches_ptr, values_ptr, ids_ptr, parents_ptr, logprobs_ptr, choices_ptr,
    row_stride, count, vocab,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    search = tl.program_id(0)
    search_ptr = searches_ptr + search * _SEARCH_WORDS
    first = tl.load(search_ptr)
    width = tl.load(search_ptr + _WIDTH)
    if width > 0:
        keep = tl.load(search_ptr + _KEEP)
        ends = tl.load(search_ptr + _ENDS + tl.arange(0, _MOST_ENDS))
        lanes = tl.arange(0, WIDTH * COUNT)
        beam, number = lanes // COUNT, lanes % COUNT
        row = tl.load(rows_ptr + first + beam, mask=beam < width, other=-1).to(tl.int64)
        valid = (row >= 0) & (number < count)
        rank = tl.load(words_ptr + row * row_stride + _RANK, mask=valid, other=0)
        so_far = tl.load(words_ptr + row * row_stride + _LOGPROB, mask=valid, other=0).to(tl.float32, bitcast=True)
        at = (first + beam).to(tl.int64) * count + number
        value = tl.load(values_ptr + at, mask=valid, other=float("-inf")) + so_far
        token = tl.load(ids_ptr + at, mask=valid, other=0)
        token = tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int32)  # arbitrary if the logits are NaN
        order = tl.where(value == value, ordered(value), 0x7FFFFFFF).to(tl.int64)
        lowest = tl.full([WIDTH * COUNT], -0x7FFFFFFFFFFFFFFF, tl.int64)
        key = tl.where(valid, (order << 32) + (0x7FFFFFFF - (rank * COUNT + number)).to(tl.int64), lowest)

        slots = tl.arange(0, WIDTH)
        parents, tokens = slots, tl.zeros([WIDTH], tl.int32)
        logprobs = tl.full([WIDTH], float("-inf"), tl.float32)
        running = 0
        for place in range(keep):
            is_best = key == tl.max(key, axis=0)
            best_beam = tl.minimum(tl.sum(tl.where(is_best, beam, 0), axis=0), width - 1)
            best_token = tl.sum(tl.where(is_best, token, 0), axis=0)
            best_value = tl.sum(tl.where(is_best, value, 0.0), axis=0)
            key = tl.where(is_best, lowest, key)
            out = search.to(tl.int64) * 2 * count + place
            tl.store(logprobs_ptr + search * count + place, best_value)
            tl.store(choices_ptr + out, best_beam)
            tl.store(choices_ptr + out + count, best_token)
            ended = tl.sum((ends == best_token).to(tl.int32), axis=0)
            here = (slots == running) & (ended == 0)  # beyond the width: nowhere, or an unused index
            parents = tl.where(here, best_beam, parents)
            tokens = tl.where(here, best_token, tokens)
            logprobs = tl.where(here, best_value, logprobs)
            running += (ended == 0).to(tl.int32)

        # The first child of a beam takes its slot, the others take the slots of dead beams, in order.
        lives = slots < width
        twins = (parents[:, None] == parents[None, :]) & (slots[None, :] < slots[:, None]) & lives[None, :]
        is_first = tl.sum(twins.to(tl.int32), axis=1) == 0
        children = (parents[:, None] == slots[None, :]) & lives[:, None]
        dead = lives & (tl.sum(children.to(tl.int32), axis=0) == 0)
        extra = lives & (is_first == 0)
        dead_place = tl.cumsum(dead.to(tl.int32), axis=0) - 1
        extra_place = tl.cumsum(extra.to(tl.int32), axis=0) - 1
        takes = dead[None, :] & (dead_place[None, :] == extra_place[:, None])
        slot = tl.where(is_first, parents, tl.sum(tl.where(takes, slots[None, :], 0), axis=1))
        target = tl.load(rows_ptr + first + slot, mask=lives, other=-1).to(tl.int64)
        written = lives & (target >= 0)
        word_ptr = words_ptr + target * row_stride
        tl.debug_barrier()  # all threads have read the slots before they are written
        tl.store(word_ptr + _TOKEN, tokens, mask=written)
        tl.store(word_ptr + _LOGPROB, logprobs.to(tl.int32, bitcast=True), mask=written)
        tl.store(word_ptr + _RANK, slots, mask=written)
        tl.store(parents_ptr + first + slot, first + parents, mask=written)


@launched
@triton.jit
def _fork_rows_kernel(
    words_ptr, rows_ptr, parents_ptr, copies_ptr, row_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    tl.store(copies_ptr + 2 * i, -1)
    tl.store(copies_ptr + 2 * i + 1, -1)
    if row >= 0:
        parent = tl.load(parents_ptr + i)
        if parent != i:
            word_ptr = words_ptr + row * row_stride
            source_ptr = words_ptr + tl.load(rows_ptr + parent).to(tl.int64) * row_stride
            position = tl.load(word_ptr + _POSITION)
            full = position // BLOCK_SIZE
            for start in range(0, full, TILE):
                columns = start + tl.arange(0, TILE)
                blocks = tl.load(source_ptr + _TABLE + columns, mask=columns < full, other=0)
                tl.store(word_ptr + _TABLE + columns, blocks, mask=columns < full)
            if position % BLOCK_SIZE != 0:
                tl.store(copies_ptr + 2 * i, tl.load(source_ptr + _TABLE + full).to(tl.int64))
                tl.store(copies_ptr + 2 * i + 1, tl.load(word_ptr + _TABLE + full).to(tl.int64))


def choose_beams(
    words: Tensor, rows: Tensor, searches: Tensor, values: Tensor, ids: Tensor, vocab: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.choose_beams`."""
    n, count = values.shape
    parents = words.new_empty(n)
    logprobs = values.new_empty(searches.shape[0], count)
    choices = words.new_empty(searches.shape[0], 2, count)
    _choose_beams_kernel[(searches.shape[0],)](
        words, rows, searches, values, ids, parents, logprobs, choices, words.stride(0), count, vocab,
        WIDTH=power_of_two(width), COUNT=power_of_two(count),
        num_warps=4, **pdl_options(words.device),
    )  # fmt: skip
    return parents, logprobs, choices


def fork_rows(words: Tensor, rows: Tensor, parents: Tensor, block_size: int) -> Tensor:
    """Compute `reference.fork_rows`."""
    copies = rows.new_empty(rows.shape[0], 2, dtype=torch.int64)
    _fork_rows_kernel[(rows.shape[0],)](
        words, rows, parents, copies, words.stride(0),
        BLOCK_SIZE=block_size, TILE=min(_TABLE_TILE, next_power_of_2(words.shape[1])),
        num_warps=4, **pdl_options(words.device),
    )  # fmt: skip
    return copies
