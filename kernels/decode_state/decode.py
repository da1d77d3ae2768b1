"""Device state of the decoding sequences: one slot of 32-bit words each, which every step reads and writes.

`Field` names the words of a slot. For each step, the CPU sends only the list of slots, and the words that have changed
since the last step.

- ``begin_decode`` gathers n slots into the inputs of the model and the sampler, and advances each slot's position by
  one. Grid: (n). Bytes: the used part of each block table, read and written: 8 per block of context.
- ``penalize`` applies repetition, frequency and presence penalties from tables of counts. Grid: (n, pieces of the
  vocabulary). Bytes per token: its logit and its count (4) are read, a float32 logit is written.
- ``end_decode`` stores the drawn tokens, which the next step computes. Grid: (1).

Slot -1 is padding: its KV slot is -1, its context empty, and nothing is written for it.
"""

import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.arguments import DecodeInputs, Field, cdiv, next_power_of_2
from minillm.kernels.compat import pdl_options, wait_for_inputs
from minillm.kernels.launch import launched

_PIECE = 4096  # of the vocabulary per program
_TABLE_TILE = 1024

_TOKEN = tl.constexpr(Field.TOKEN)
_POSITION = tl.constexpr(Field.POSITION)
_TEMPERATURE = tl.constexpr(Field.TEMPERATURE)
_TOP_K = tl.constexpr(Field.TOP_K)
_TOP_P = tl.constexpr(Field.TOP_P)
_MIN_P = tl.constexpr(Field.MIN_P)
_SEED_LOW = tl.constexpr(Field.SEED_LOW)
_SEED_HIGH = tl.constexpr(Field.SEED_HIGH)
_REPETITION = tl.constexpr(Field.REPETITION_PENALTY)
_FREQUENCY = tl.constexpr(Field.FREQUENCY_PENALTY)
_PRESENCE = tl.constexpr(Field.PRESENCE_PENALTY)
_FORKS = tl.constexpr(Field.FORKS)
_TABLE = tl.constexpr(Field.TABLE)


@triton.jit
def row_float(words_ptr):
    return tl.load(words_ptr).to(tl.float32, bitcast=True)


@launched
@triton.jit
def _begin_decode_kernel(
    words_ptr, rows_ptr,
    tokens_ptr, positions_ptr, slots_ptr, lens_ptr, tables_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, draws_ptr,
    row_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row < 0:
        tl.store(tokens_ptr + i, 0)
        tl.store(positions_ptr + i, 0)
        tl.store(slots_ptr + i, -1)
        tl.store(lens_ptr + i, 0)
        tl.store(temperature_ptr + i, 0.0)
        tl.store(top_k_ptr + i, 0)
        tl.store(top_p_ptr + i, 1.0)
        tl.store(min_p_ptr + i, 0.0)
        tl.store(seeds_ptr + i, 0)
        tl.store(draws_ptr + i, 0)
    else:
        word_ptr = words_ptr + row * row_stride
        position = tl.load(word_ptr + _POSITION)
        block = tl.load(word_ptr + _TABLE + position // BLOCK_SIZE).to(tl.int64)
        tl.store(tokens_ptr + i, tl.load(word_ptr + _TOKEN).to(tl.int64))
        tl.store(positions_ptr + i, position.to(tl.int64))
        tl.store(slots_ptr + i, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(lens_ptr + i, position + 1)
        tl.store(temperature_ptr + i, row_float(word_ptr + _TEMPERATURE))
        tl.store(top_k_ptr + i, tl.load(word_ptr + _TOP_K).to(tl.int64))
        tl.store(top_p_ptr + i, row_float(word_ptr + _TOP_P))
        tl.store(min_p_ptr + i, row_float(word_ptr + _MIN_P))
        low = tl.load(word_ptr + _SEED_LOW).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(word_ptr + _SEED_HIGH).to(tl.int64)
        tl.store(seeds_ptr + i, (high << 32) | low)
        tl.store(draws_ptr + i, (position + 1).to(tl.int64))
        used = position // BLOCK_SIZE + 1
        for start in range(0, used, TILE):
            columns = start + tl.arange(0, TILE)
            blocks = tl.load(word_ptr + _TABLE + columns, mask=columns < used, other=0)
            tl.store(tables_ptr + i.to(tl.int64) * table_stride + columns, blocks, mask=columns < used)
        tl.store(word_ptr + _POSITION, position + 1)


@launched
@triton.jit(do_not_specialize=["n"])
def _end_decode_kernel(
    words_ptr, counts_ptr, rows_ptr, tokens_ptr, n, row_stride, vocab,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    lanes = tl.arange(0, TILE)
    rows = tl.load(rows_ptr + lanes, mask=lanes < n, other=-1).to(tl.int64)
    tokens = tl.load(tokens_ptr + lanes, mask=lanes < n, other=0)
    draws = rows >= 0
    draws &= tl.load(words_ptr + rows * row_stride + _FORKS, mask=draws, other=1) == 0
    tl.store(words_ptr + rows * row_stride + _TOKEN, tokens.to(tl.int32), mask=draws)
    count_ptr = counts_ptr + rows * vocab + tokens
    tl.store(count_ptr, tl.load(count_ptr, mask=draws, other=0) + 2, mask=draws)


@launched
@triton.jit
def _penalize_kernel(
    out_ptr, logits_ptr, words_ptr, counts_ptr, rows_ptr, row_stride, logits_stride, vocab,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    ids = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_id = ids < vocab
    x = tl.load(logits_ptr + i * logits_stride + ids, mask=is_id, other=0.0).to(tl.float32)
    if row >= 0:
        word_ptr = words_ptr + row * row_stride
        repetition = row_float(word_ptr + _REPETITION)
        frequency = row_float(word_ptr + _FREQUENCY)
        presence = row_float(word_ptr + _PRESENCE)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            count = tl.load(counts_ptr + row * vocab + ids, mask=is_id, other=0)
            x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
            generated = count >> 1
            x = tl.where(generated > 0, x - (frequency * generated.to(tl.float32) + presence), x)
    tl.store(out_ptr + i * vocab + ids, x, mask=is_id)


def begin_decode(words: Tensor, rows: Tensor, block_size: int, inputs: DecodeInputs) -> None:
    """Fill ``inputs`` from the slots and advance their positions: see `reference.begin_decode`."""
    _begin_decode_kernel[(rows.shape[0],)](
        words, rows,
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens, inputs.block_tables,
        *inputs.sampling, words.stride(0), inputs.block_tables.stride(0),
        BLOCK_SIZE=block_size, TILE=min(_TABLE_TILE, next_power_of_2(inputs.block_tables.shape[1])),
        num_warps=4, **pdl_options(words.device),
    )  # fmt: skip


def penalize(logits: Tensor, words: Tensor, counts: Tensor, rows: Tensor, out: Tensor) -> None:
    """Apply the penalties in the slots to the logits. Write the results to ``out``: see `reference.penalize`."""
    n, vocab = logits.shape
    _penalize_kernel[(n, cdiv(vocab, _PIECE))](
        out, logits, words, counts, rows, words.stride(0), logits.stride(0), vocab,
        PIECE=_PIECE, num_warps=8, **pdl_options(words.device),
    )  # fmt: skip


def end_decode(words: Tensor, counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Store the drawn tokens in their slots, and count them: see `reference.end_decode`."""
    n = rows.shape[0]
    _end_decode_kernel[(1,)](
        words, counts, rows, token_ids, n, words.stride(0), counts.shape[1],
        TILE=max(64, next_power_of_2(n)), num_warps=4, **pdl_options(words.device),
    )  # fmt: skip
