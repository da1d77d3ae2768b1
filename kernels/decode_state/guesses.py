"""Guesses at a sequence's next tokens that the device makes, computes and judges before the host has seen its last one.

A step computes a sequence's last token and ``n - 1`` guesses as if they were n sequences that decode. The sequence has
a row of `minillm.kernels.decode_state.decode`, and its text lies in ``history``.

- ``begin_guesses`` finds where the text's last tokens occurred before, and writes the inputs of the n rows. Each
  program searches for itself, which takes no longer than if one did. Grid: (n). Bytes: of the text's last 8,192 tokens
  4 each, from L2 in 16 shifts; the used part of the block table, read and written.
- ``end_guesses`` keeps the drawn tokens as far as they are the guesses, and the one behind them: it moves the row on,
  and writes them to the text. Grid: (1).

Row -1 is padding: no slot, no context, and nothing is written for it.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import DecodeInputs, Field
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.decode_state.decode import row_float
from minillm.kernels.reference import LONGEST_MATCH, MOST_SEARCHED

_TILE = 1024

_TOKEN = tl.constexpr(Field.TOKEN)
_POSITION = tl.constexpr(Field.POSITION)
_TEMPERATURE = tl.constexpr(Field.TEMPERATURE)
_TOP_K = tl.constexpr(Field.TOP_K)
_TOP_P = tl.constexpr(Field.TOP_P)
_MIN_P = tl.constexpr(Field.MIN_P)
_SEED_LOW = tl.constexpr(Field.SEED_LOW)
_SEED_HIGH = tl.constexpr(Field.SEED_HIGH)
_TABLE = tl.constexpr(Field.TABLE)


@triton.jit
def _begin_guesses_kernel(
    words_ptr, row_ptr, history_ptr, guesses_ptr,
    tokens_ptr, positions_ptr, slots_ptr, lens_ptr, tables_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, draws_ptr,
    row_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, TABLE_TILE: tl.constexpr, TILE: tl.constexpr,
    LONGEST: tl.constexpr, SEARCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    row = tl.load(row_ptr).to(tl.int64)
    word_ptr = words_ptr + tl.maximum(row, 0) * row_stride
    last = tl.load(word_ptr + _POSITION)  # of the text's last token, which is not in the history yet
    token = tl.load(word_ptr + _TOKEN)
    found = tl.full([], 0, tl.int64)  # (tokens that agree, their place)
    if (row >= 0) & (i > 0):
        for start in range(tl.maximum(1, last - SEARCHED), last, TILE):
            places = start + tl.arange(0, TILE)
            is_place = places < last
            agree = tl.load(history_ptr + places, mask=is_place, other=-1) == token
            length = agree.to(tl.int32)
            for back in tl.static_range(1, LONGEST):  # loads do not wait for those before them
                mine = tl.load(history_ptr + last - back, mask=last >= back, other=-2)
                agree &= tl.load(history_ptr + places - back, mask=is_place & (places >= back), other=-1) == mine
                length += agree.to(tl.int32)
            best = tl.where(length > 0, (length.to(tl.int64) << 32) + places, 0)
            found = tl.maximum(found, tl.max(best, axis=0))
    place = (found & 0x7FFFFFFF).to(tl.int32)
    if i > 0:
        # Behind its end the text is taken to go on repeating itself.
        source = place + 1 + (i - 1) % tl.maximum(last - place, 1)
        guess = tl.load(history_ptr + source, mask=(found > 0) & (source < last), other=-1)
        token = tl.where((found > 0) & (source == last), token, guess)
        tl.store(guesses_ptr + i - 1, token.to(tl.int64))
    computed = (row >= 0) & (token >= 0)
    position = last + i
    block = tl.load(word_ptr + _TABLE + position // BLOCK_SIZE, mask=computed, other=0).to(tl.int64)
    tl.store(tokens_ptr + i, tl.where(computed, token, 0).to(tl.int64))
    tl.store(positions_ptr + i, tl.where(computed, position, 0).to(tl.int64))
    tl.store(slots_ptr + i, tl.where(computed, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(lens_ptr + i, tl.where(computed, position + 1, 0))
    tl.store(temperature_ptr + i, tl.where(computed, row_float(word_ptr + _TEMPERATURE), 0.0))
    tl.store(top_k_ptr + i, tl.where(computed, tl.load(word_ptr + _TOP_K), 0).to(tl.int64))
    tl.store(top_p_ptr + i, tl.where(computed, row_float(word_ptr + _TOP_P), 1.0))
    tl.store(min_p_ptr + i, tl.where(computed, row_float(word_ptr + _MIN_P), 0.0))
    low = tl.load(word_ptr + _SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(word_ptr + _SEED_HIGH).to(tl.int64)
    tl.store(seeds_ptr + i, tl.where(computed, (high << 32) | low, 0))
    tl.store(draws_ptr + i, tl.where(computed, position + 1, 0).to(tl.int64))
    used = tl.where(computed, position // BLOCK_SIZE + 1, 0)
    for start in range(0, used, TABLE_TILE):
        columns = start + tl.arange(0, TABLE_TILE)
        blocks = tl.load(word_ptr + _TABLE + columns, mask=columns < used, other=0)
        tl.store(tables_ptr + i.to(tl.int64) * table_stride + columns, blocks, mask=columns < used)


@triton.jit
def _end_guesses_kernel(
    words_ptr, row_ptr, history_ptr, tokens_ptr, guesses_ptr, n, row_stride, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.load(row_ptr).to(tl.int64)
    lanes = tl.arange(0, TILE)
    if row >= 0:
        word_ptr = words_ptr + row * row_stride
        tokens = tl.load(tokens_ptr + lanes, mask=lanes < n, other=-1)
        guesses = tl.load(guesses_ptr + lanes, mask=lanes < n - 1, other=-2)
        right = tl.min(tl.where(tokens == guesses, TILE, lanes), axis=0)  # guesses
        last = tl.load(word_ptr + _POSITION)
        tl.store(history_ptr + last, tl.load(word_ptr + _TOKEN))
        tl.store(history_ptr + last + 1 + lanes, tokens.to(tl.int32), mask=lanes < right)
        tl.debug_barrier()  # the token that was computed is read above
        tl.store(word_ptr + _TOKEN, tl.sum(tl.where(lanes == right, tokens, 0), axis=0).to(tl.int32))
        tl.store(word_ptr + _POSITION, last + right + 1)


def begin_guesses(
    words: Tensor, row: Tensor, history: Tensor, block_size: int, inputs: DecodeInputs, guesses: Tensor
) -> None:
    """Make guesses, and fill ``inputs`` with them behind the row's token: see `reference.begin_guesses`."""
    n = inputs.token_ids.shape[0]
    _begin_guesses_kernel[(n,)](
        words, row, history, guesses,
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens, inputs.block_tables,
        *inputs.sampling, words.stride(0), inputs.block_tables.stride(0),
        BLOCK_SIZE=block_size, TABLE_TILE=min(_TILE, triton.next_power_of_2(inputs.block_tables.shape[1])),
        TILE=_TILE, LONGEST=LONGEST_MATCH, SEARCHED=MOST_SEARCHED,
        num_warps=8, **pdl_options(words.device),
    )  # fmt: skip


def end_guesses(words: Tensor, row: Tensor, history: Tensor, token_ids: Tensor, guesses: Tensor) -> None:
    """Keep the drawn tokens that the guesses are, and the one behind them: see `reference.end_guesses`."""
    n = token_ids.shape[0]
    _end_guesses_kernel[(1,)](
        words, row, history, token_ids, guesses, n, words.stride(0),
        TILE=triton.next_power_of_2(n), num_warps=1, **pdl_options(words.device),
    )  # fmt: skip
