"""Decode steps whose state stays on the device: the host sends what has changed, and replays a CUDA graph.

A sequence that decodes has a *row* on the device (`minillm.kernels.decode_rows`): its next token, that token's
position, its sampling parameters and its block table. A step is three launches for the host, whatever the model's
depth: the list of rows (where it has changed), a graph from token ids to logits, and a graph from logits to drawn
tokens, which go back into the rows. The next step can be launched before the host has seen them.

Graphs are captured for padded numbers of sequences, when a number is first met: their shapes are fixed, everything
else, sharing and lengths included, is data. Padding rows write nowhere.

Where several ranks share the model, rank 0 keeps the books and draws; the others hold the same rows, hear what has
changed (`DecodeWork`) and replay graphs of their own. What was drawn lies on rank 0's device, perhaps before its host
knows: each step begins with a broadcast of its token ids, inside the graph, so that no rank but rank 0 needs to know of
sampling. (All ranks could draw the same tokens from the same logits and seeds; then all would need every request's
parameters, and one differing bit would part them for good.)
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minillm import kernels
from minillm.cache import BlockTable
from minillm.engine.scheduler import ScheduledChunk
from minillm.kernels import AttentionShape, Costs, DecodeInputs, Field, Plan, WorkList
from minillm.model.batch import Batch
from minillm.model.llama import Llama
from minillm.model.sharded import ranks_of
from minillm.params import SamplingParams
from minillm.runner.penalties import needs_host, process_logits
from minillm.runner.sampler import SampleRow, draw
from minillm.runner.step import DecodeWork
from minillm.sequence import Sequence as TokenSequence

Result = TypeVar("Result")


def padded_size(n: int) -> int:
    """The number of rows that n sequences are computed with: few enough graphs, and little waste."""
    if n <= 8:
        return 1 << (n - 1).bit_length()
    step = 8 if n <= 64 else 16
    return -(-n // step) * step


def attention_shape(model: Llama) -> AttentionShape:
    """What of a model, or of a rank's part of it, and its device decides how attention is cut up."""
    c, processors = model.local, 1
    if model.device.type == "cuda":
        processors = torch.cuda.get_device_properties(model.device).multi_processor_count
    return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, model.dtype.itemsize, processors)


def decode_bytes(model: Llama, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """The memory of a `DecodeSteps`: logits, penalties' counts, block tables twice, and attention's partial results."""
    rows, width = padded_size(max_num_seqs), -(-max_model_len // block_size)
    partial = attention_shape(model).max_results(rows) * model.local.num_heads * (model.local.head_dim + 1) * 4
    words = 2 * 4 * (Field.TABLE + width)
    return rows * (model.config.vocab_size * (model.dtype.itemsize + 4 + 4) + words) + partial


@dataclass(slots=True)
class _Row:
    """What the device knows of one sequence."""

    index: int
    table: BlockTable | None = None
    num_blocks: int = 0
    last_block: int = -1
    position: int = -1
    has_token: bool = False  # the row's token is the sequence's last one


class DecodeSteps:
    """The rows of a model's decoding sequences, and the graphs that compute them.

    Args:
        max_model_len: longest sequence in tokens; a row has room for its block table.
        graphs: capture CUDA graphs; without, the same operations run one by one.
        sharing: what reading shared blocks once must be worth; None: never do it.
    """

    def __init__(
        self,
        model: Llama,
        kv_cache: Tensor,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        graphs: bool,
        sharing: Costs | None,
    ) -> None:
        self._model, self._kv_cache, self._block_size = model, kv_cache, block_size
        self._device, self._graphs = model.device, graphs
        width = -(-max_model_len // block_size)
        capacity = padded_size(max_num_seqs)
        self._words = torch.zeros(max_num_seqs, Field.TABLE + width, dtype=torch.int32, device=self._device)
        self._inputs = DecodeInputs.allocate(capacity, width, self._device)
        self._rows = torch.full((capacity,), -1, dtype=torch.int32, device=self._device)
        self._told_rows: list[int] = []
        self._ranks = ranks_of(model)
        draws = self._ranks is None or self._ranks.rank == 0
        vocab = model.config.vocab_size if draws else 0
        # For penalties: how often each token occurred, `minillm.kernels.reference.penalise` says how it is counted.
        self._counts = torch.zeros(max_num_seqs, vocab, dtype=torch.int32, device=self._device)
        self.logits = torch.zeros(capacity, vocab, dtype=model.dtype, device=self._device)
        self._sharing = sharing
        self._work = WorkList.allocate(capacity, attention_shape(model), self._device)
        self._planned: tuple[list[int], int] = ([], 0)  # the rows, and the size of the batch, that the plan is for
        self._replan = True  # tables have changed since, other than by growing
        self._shares = False  # there is a plan: sharing is worth it
        self._held: dict[int, _Row] = {}  # by seq_id
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._changes: dict[int, int] = {}  # index into the words -> value
        self._forward_graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._draw_graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self._stream: torch.cuda.Stream | None = None  # one for all captures: cuBLAS keeps 32 MiB for each that it sees
        self._pool: Any = None  # the graphs' memory: they run one after another, so they share it
        self._size = 0  # rows of the last step, padding included
        # For measurements: (begin, end) of each step on the device, noted where this is a list.
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event] | None] | None = None

    def work_for(self, chunks: Sequence[ScheduledChunk], *, joins: bool) -> DecodeWork:
        """What `forward`, or `join` if it ``joins`` prompts, has to be told to compute one token of each sequence."""
        n = len(chunks)
        rows = self._rows_of(chunks)
        rows += [-1] * (padded_size(n) - n)
        plan = self._plan(chunks, rows, n if joins else len(rows))
        changes, self._changes = self._changes, {}
        same = rows == self._told_rows
        self._told_rows = rows
        return DecodeWork(n, None if same else rows, list(changes), list(changes.values()), self._shares, plan)

    def forward(self, work: DecodeWork) -> None:
        """Compute one token of each sequence; `logits` then holds a row for each, in their order."""
        size = self._begin(work)
        shared = self._shared(work, size)
        if self.marks is not None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.marks.append((begin, end))
            begin.record()
        if not self._graphs:
            self._forward(size, shared)
        else:
            key = size, shared is not None
            if key not in self._forward_graphs:
                self._forward_graphs[key], _ = self._capture(lambda: self._forward(size, shared))
            self._forward_graphs[key].replay()
        self._mark_end()

    def join(self, work: DecodeWork, prefill: Batch) -> Batch:
        """One batch of decoding sequences and of chunks of prompts, to be computed without a graph.

        The weights are read once for both, which is what a small batch of decodes would cost.
        """
        n, p = work.num_seqs, prefill.context_lens.shape[0]
        self._gather_inputs(self._begin(work))
        inputs = self._inputs.first(n + p)
        inputs.block_tables[n:, : prefill.block_tables.shape[1]] = prefill.block_tables
        inputs.context_lens[n:] = prefill.context_lens
        logit_rows = torch.arange(n, device=self._device)
        if prefill.logit_rows is not None:
            logit_rows = torch.cat((logit_rows, prefill.logit_rows + n))
        return Batch(
            token_ids=torch.cat((inputs.token_ids[:n], prefill.token_ids)),
            positions=torch.cat((inputs.positions[:n], prefill.positions)),
            slot_mapping=torch.cat((inputs.slot_mapping[:n], prefill.slot_mapping)),
            block_tables=inputs.block_tables,
            context_lens=inputs.context_lens,
            num_decodes=n,
            cu_seqlens=prefill.cu_seqlens,
            shared=self._shared(work, n),
            logit_rows=logit_rows,
        )

    def draw(self, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token for sequences of the last `forward` or `join`, and keep it as the one to be computed next.

        Returns:
            Token ids ``[rows]`` int64, their log-probabilities, and their rows of logits, valid until the next step.
        """
        size = self._size
        penalised = any(row.params.has_penalties for row in rows)
        if not self._graphs:
            tokens, logprobs = self._draw(size, penalised)
        else:
            if (size, penalised) not in self._draw_graphs:
                self._draw_graphs[size, penalised] = self._capture(lambda: self._draw(size, penalised))
            graph, (tokens, logprobs) = self._draw_graphs[size, penalised]
            graph.replay()
        self._mark_end()
        for row in rows:
            self._held[row.sequence.seq_id].has_token = True
        if len(rows) == rows[-1].logits_row + 1:
            return tokens[: len(rows)], logprobs[: len(rows)], self.logits[: len(rows)]
        at = self._tensor([row.logits_row for row in rows], torch.int64)  # beams, which decide otherwise, lie between
        return tokens[at], logprobs[at], self.logits[at]

    def draw_from(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor, Tensor]:
        """`draw` for any rows of logits: first tokens of prompts, and requests whose logits the host has to change."""
        current = {row.sequence.seq_id for row in rows}
        held = [self._held.get(row.sequence.seq_id) or self._take(row.sequence, row.params, current) for row in rows]
        changes, self._changes = self._changes, {}
        self._change(list(changes), list(changes.values()))
        hosted = [i for i, row in enumerate(rows) if needs_host(row.params, row.sequence)]
        raw = processed = logits[self._tensor([row.logits_row for row in rows], torch.int64)]
        if hosted or any(row.params.has_penalties for row in rows):
            processed = torch.empty_like(raw, dtype=torch.float32)
            indices = self._tensor([-1 if i in hosted else row.index for i, row in enumerate(held)], torch.int32)
            kernels.penalise(raw, self._words, self._counts, indices, processed)
            for i in hosted:
                process_logits(processed[i], rows[i].params, rows[i].sequence, rows[i].end_ids)
        tokens = draw(processed, rows)
        kernels.end_decode(self._words, self._counts, self._tensor([row.index for row in held], torch.int32), tokens)
        for row in held:
            row.has_token = True
        return tokens, kernels.log_probabilities(raw, tokens), raw

    def _mark_end(self) -> None:
        if self.marks and self.marks[-1] is not None:
            self.marks[-1][1].record()

    def drop_graphs(self) -> None:
        """Forget the captured graphs; those that are needed again are captured again."""
        self._forward_graphs.clear()
        self._draw_graphs.clear()

    def forget(self) -> None:
        """Give every row up: nobody knows what the device holds, after a failure."""
        self._held.clear()
        self._changes.clear()
        self._free = list(range(self._words.shape[0] - 1, -1, -1))
        self._told_rows = []
        self._replan = True

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _rows_of(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        """Each sequence's row, with all that has changed since the device last heard of it noted down."""
        held, changes, width = self._held, self._changes, self._words.shape[1]
        current: set[int] | None = None
        rows = []
        for chunk in chunks:
            sequence = chunk.sequence
            row = held.get(sequence.seq_id)
            if row is None:
                current = current or {each.sequence.seq_id for each in chunks}
                row = self._take(sequence, chunk.group.params, current)
                self._replan = True
            table = sequence.table
            assert table is not None
            blocks = table.blocks
            if row.table is not table:
                row.table, row.num_blocks = table, 0
                self._replan = True
            if len(blocks) != row.num_blocks or blocks[-1] != row.last_block:
                first = max(0, row.num_blocks - 1)  # the last one may have been copied on write
                self._replan |= len(blocks) <= first or blocks[first] != row.last_block
                at = row.index * width + Field.TABLE + first
                changes.update(zip(range(at, at + len(blocks) - first), blocks[first:], strict=True))
                row.num_blocks, row.last_block = len(blocks), blocks[-1]
            if row.position != sequence.num_computed:
                changes[row.index * width + Field.POSITION] = row.position = sequence.num_computed
                self._replan = True
            if not row.has_token:
                assert not sequence.num_pending, f"nobody knows the last token of sequence {sequence.seq_id}"
                changes[row.index * width + Field.TOKEN] = sequence.token_ids[-1]
            row.has_token = False  # until one is drawn
            row.position += 1
            rows.append(row.index)
        return rows

    def _take(self, sequence: TokenSequence, params: object, current: set[int]) -> _Row:
        """A row for a sequence that has none; where all are held, sequences give theirs up that are not at work."""
        if not self._free:
            for seq_id in [seq_id for seq_id in self._held if seq_id not in current]:
                self._free.append(self._held.pop(seq_id).index)
        row = self._held[sequence.seq_id] = _Row(self._free.pop())
        if isinstance(params, SamplingParams):
            if params.has_penalties:
                self._count_tokens(row, sequence)
            at = row.index * self._words.shape[1]
            self._changes.update(
                {
                    at + Field.TEMPERATURE: _bits(params.temperature),
                    at + Field.TOP_K: min(params.top_k, (1 << 31) - 1),
                    at + Field.TOP_P: _bits(params.top_p),
                    at + Field.MIN_P: _bits(params.min_p),
                    at + Field.SEED_LOW: _signed(sequence.seed),
                    at + Field.SEED_HIGH: _signed(sequence.seed >> 32),
                    at + Field.REPETITION_PENALTY: _bits(params.repetition_penalty),
                    at + Field.FREQUENCY_PENALTY: _bits(params.frequency_penalty),
                    at + Field.PRESENCE_PENALTY: _bits(params.presence_penalty),
                }
            )
        return row

    def _count_tokens(self, row: _Row, sequence: TokenSequence) -> None:
        """Begin to count a sequence's tokens, for its penalties."""
        counts = torch.zeros(self.logits.shape[1], dtype=torch.int32)
        counts[torch.tensor(sequence.token_ids[: sequence.num_prompt_tokens])] = 1
        generated = torch.tensor(sequence.output_token_ids, dtype=torch.int64)
        counts.index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))
        self._counts[row.index] = counts.to(self._device)

    def _tensor(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=self._graphs).to(self._device, non_blocking=True)

    def _begin(self, work: DecodeWork) -> int:
        """Write down what has changed. Returns the number of rows, padding included."""
        self._change(work.changed, work.values)
        if work.rows is not None:
            self._size = len(work.rows)
            self._rows[: self._size].copy_(self._tensor(work.rows, torch.int32))
        return self._size

    def _change(self, places: list[int], values: list[int]) -> None:
        if places:
            source = torch.tensor([places, values], pin_memory=self._graphs)
            at, words = source.to(self._device, non_blocking=True)
            self._words.view(-1)[at] = words.to(torch.int32)

    def _plan(self, chunks: Sequence[ScheduledChunk], rows: list[int], size: int) -> list[list[int]] | None:
        """What the sequences of a step share, for a batch of ``size``, where that has to be told anew.

        A plan stays good while its sequences only grow, so it is made anew when others decode or when a table changes.
        """
        if self._sharing is None or (not self._replan and (rows, size) == self._planned):
            return None
        tables = [chunk.sequence.table.blocks for chunk in chunks if chunk.sequence.table is not None]
        lens = [chunk.sequence.num_computed + 1 for chunk in chunks]
        plan = kernels.plan_attention(tables, lens, self._block_size, self._work.shape, size, self._sharing)
        self._planned, self._replan, self._shares = (rows, size), False, plan is not None
        return None if plan is None else [plan.order, plan.tails, plan.starts, plan.counts, plan.items]

    def _shared(self, work: DecodeWork, size: int) -> WorkList | None:
        """The step's work list, on the device; None where reading shared blocks once is not worth it."""
        if work.plan is not None:
            self._work.first(size).fill(Plan(*work.plan))
        return self._work.first(size) if work.shares_blocks else None

    # --- what the graphs hold -----------------------------------------------------------------------------------------

    def _gather_inputs(self, size: int) -> DecodeInputs:
        inputs = self._inputs.first(size)
        kernels.begin_decode(self._words, self._rows[:size], self._block_size, inputs)
        if self._ranks is not None:
            self._ranks.broadcast(inputs.token_ids)
        return inputs

    def _forward(self, size: int, shared: WorkList | None) -> None:
        inputs = self._gather_inputs(size)
        batch = Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            context_lens=inputs.context_lens,
            num_decodes=size,
            cu_seqlens=inputs.context_lens[:0],
            shared=shared,
        )
        self._model.forward(batch, self._kv_cache, out=self.logits[:size])

    def _draw(self, size: int, penalised: bool) -> tuple[Tensor, Tensor]:
        inputs, rows, raw = self._inputs.first(size), self._rows[:size], self.logits[:size]
        logits = raw
        if penalised:
            logits = torch.empty_like(raw, dtype=torch.float32)
            kernels.penalise(raw, self._words, self._counts, rows, logits)
        tokens, logprobs = kernels.sample_with_logprobs(logits, inputs.sampling)
        kernels.end_decode(self._words, self._counts, rows, tokens)
        return tokens, kernels.log_probabilities(raw, tokens) if penalised else logprobs

    def _capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Run ``work`` on padding, so that its kernels are compiled, then record it."""
        sent = self._rows.clone()
        self._rows.fill_(-1)
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # A graph that is collected as garbage meanwhile would break the capture.
            collects = gc.isenabled()
            gc.disable()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
                if collects:
                    gc.enable()
        self._pool = graph.pool()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._rows.copy_(sent)
        return graph, result


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
