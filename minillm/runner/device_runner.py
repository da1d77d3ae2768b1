"""A runner for GPUs: the state of decoding sequences stays on the device, and a decode step replays a CUDA graph.

The host sends only changes (`minillm.runner.rows`). A step is three launches for a model of any depth: the list of
rows (where it has changed), a graph from token ids to logits, and a graph from logits to drawn tokens, which go back
into the rows. The next step can be launched before the host has seen them. Graphs are captured for padded numbers of
sequences, and of few sequences for padded lengths of the longest, when these are first met; everything else, sharing
included, is data. Short prompts are graphs, too: `minillm.runner.short_prompts`.

Guesses at a sequence's next tokens are computed as if they were sequences that decode, with one table and other
lengths (a layer writes all K and V before any token reads them). So these steps and their draws are graphs, too; their
rows the host writes anew each time (`minillm.runner.token_rows`).

Where several ranks share the model, rank 0 keeps the books and draws; the others hold the same rows, hear of changes
(`DecodeWork`) and replay graphs of their own. Each step begins with a broadcast of its token ids, inside the graph.
(All ranks could draw the same tokens from the same logits and seeds; then all would need every request's parameters,
and one differing bit would part them for good.)
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minillm import kernels
from minillm.cache import HostMoves
from minillm.kernels import AttentionShape, Costs, DecodeInputs, Field, Plan, WorkList
from minillm.model.llama import Batch, Llama
from minillm.model.shard import ranks_of
from minillm.params import SamplingParams
from minillm.runner.device_beams import Chosen, DeviceBeams
from minillm.runner.graphs import Graphs
from minillm.runner.masks import Masks, masks_of, needs_tokens
from minillm.runner.penalties import needs_processing, note_empty, run_processors
from minillm.runner.rows import SHORTEST, Rows, Sharing, padded_length, padded_size, sampling_words
from minillm.runner.runner import Runner
from minillm.runner.sampler import MANY, Drawn, draw_tokens
from minillm.runner.short_prompts import ShortPrompts
from minillm.runner.step import ChunkWork, DecodeWork, StepWork
from minillm.runner.to_device import to_device
from minillm.runner.token_rows import MOST_TOKENS, TokenRows
from minillm.sequence import Chunk, Schedule, Sequence, SequenceGroup

Found = tuple[Tensor, ...]  # of each row: its token, that one's log-probability, and those and ids of the most probable
_LISTED = 5, 8, 16, 32  # the numbers of most probable tokens that graphs find for every row
_REHEARSED = 37  # tokens of a prompt: no multiple of anything, as most prompts


def attention_shape(model: Llama) -> AttentionShape:
    """Return the properties of a model (or of a rank's part) and its device that decide how attention is cut up."""
    c, processors = model.local, 1
    if model.device.type == "cuda":
        processors = torch.cuda.get_device_properties(model.device).multi_processor_count
    row = c.kv_bytes_per_token(model.kv_element_size) // (2 * c.num_layers * c.num_kv_heads)
    return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, model.dtype.itemsize, processors, row)


def _capacity(max_num_seqs: int) -> int:
    """The tokens of a step without prompts: one of each sequence, or fewer sequences' and guesses behind them."""
    return padded_size(max(max_num_seqs, MOST_TOKENS))


def decode_bytes(model: Llama, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Return the bytes that a `DeviceRunner` keeps on the device beside weights and pool."""
    # Logits, counts of tokens for penalties, block tables twice, and partial results of attention.
    rows, width = _capacity(max_num_seqs), -(-max_model_len // block_size)
    c = model.local
    if model.is_deterministic:
        from minillm.kernels.attention.invariant import partial_bytes  # not at the top: it imports Triton

        heads = c.num_heads, c.num_kv_heads, c.head_dim
        partial = partial_bytes(rows, width * block_size, *heads, model.dtype.itemsize, model.device)
        wide = 8  # all draws are from float32
    else:
        partial, wide = attention_shape(model).max_results(rows) * c.num_heads * (c.head_dim + 1) * 4, 4
    words = 2 * 4 * (Field.TABLE + width)
    bits = 4 * (model.config.vocab_size // 32 + 1)
    return rows * (model.config.vocab_size * (model.dtype.itemsize + 4 + wide) + bits + words) + partial


class DeviceRunner(Runner):
    """The model, its pool, the rows of decoding sequences and the graphs that compute them.

    Args:
        max_num_seqs: rows.
        max_model_len: longest sequence in tokens; a row has room for its block table.
        graphs: capture CUDA graphs; without, the same operations run one by one.
        sharing: the least that reading shared blocks once must save; None: never do it.
    """

    def __init__(
        self,
        model: Llama,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        max_num_seqs: int,
        max_model_len: int,
        graphs: bool,
        sharing: Costs | None,
    ) -> None:
        super().__init__(model, num_blocks, block_size, num_host_blocks)
        self._device, self._pinned = model.device, graphs
        width, capacity, shape = -(-max_model_len // block_size), _capacity(max_num_seqs), attention_shape(model)
        self._width, self._shape = width, shape
        self._words = torch.zeros(max_num_seqs, Field.TABLE + width, dtype=torch.int32, device=self._device)
        self._inputs = DecodeInputs.allocate(capacity, width, self._device)
        self._rows = torch.full((capacity,), -1, dtype=torch.int32, device=self._device)
        self._ranks = ranks_of(model)
        draws = self._ranks is None or self._ranks.rank == 0
        vocab = model.config.vocab_size if draws else 0
        # For penalties: how often each token occurred, `kernels.reference.penalise` says how it is counted.
        self._counts = torch.zeros(max_num_seqs, vocab, dtype=torch.int32, device=self._device)
        self._logits = torch.zeros(capacity, vocab, dtype=model.dtype, device=self._device)
        self._masks = torch.zeros(capacity, vocab // 32 + 1, dtype=torch.int32, device=self._device)
        self._mask_places = torch.zeros(capacity, dtype=torch.int32, device=self._device)  # of each row of logits
        self._told_places: list[int] = []
        self._work_list = WorkList.allocate(capacity, shape, self._device)
        self._tokens = TokenRows(padded_size(MOST_TOKENS), width, self._device, pinned=graphs)
        self._forwards = Graphs(self._rows, self._tokens.rows, enabled=graphs)
        self._draws = Graphs(self._rows, self._tokens.rows, enabled=graphs)
        self._prompts: ShortPrompts | None = None
        if self._ranks is None:
            self._prompts = ShortPrompts(
                model, self.kv_cache, block_size, self._forwards,
                max_num_seqs=max_num_seqs, width=width, logits=self._logits,
            )  # fmt: skip
        plans = None if sharing is None else Sharing(shape, sharing)
        self._books = Rows(max_num_seqs, self._words.shape[1], block_size, plans)
        self._choices: tuple[list[SequenceGroup], Chosen] | None = None  # of the last step, until they are taken
        self._beams = DeviceBeams(self._words, self.kv_cache, block_size, capacity, vocab, self._ranks, graphs=graphs)
        self._size = 0  # rows of the last step, padding included
        self._decodes: list[Chunk] = []  # of the last step
        self._sampling: list[dict[int, int]] = []  # of the next step's chunks, where its tokens are rows
        self._each: tuple[int, list[int]] | None = None  # if the last one's were: rows, and those of the logits

    # --- from a schedule to logits ------------------------------------------------------------------------------------

    def work_for(self, schedule: Schedule, copies: list[tuple[int, int]]) -> StepWork:
        if self._takes_rows(schedule):
            self._decodes = []
            chunks = [self.chunk_work(chunk) for chunk in schedule.chunks]
            self._sampling = [_sampling(chunk) for chunk in schedule.chunks]
            return StepWork(schedule.moves, copies, None, chunks, len(chunks))
        decodes, prefills = schedule.decodes, schedule.prefills + schedule.extended
        decode = self._books.work_for(decodes, joins=bool(prefills)) if decodes else None
        self._count_tokens()
        self._decodes = decodes
        chunks = [self.chunk_work(chunk) for chunk in prefills]
        return StepWork(schedule.moves, copies, decode, chunks, 0)

    @torch.inference_mode()
    def compute(self, work: StepWork) -> Tensor:
        """Do a step's work; returns logits ``[n, vocab]`` in the model's dtype, the decoding sequences' first."""
        self.prepare(work)
        self._each = None
        wanted = sum(chunk.num_logits for chunk in work.chunks) + (0 if work.decode is None else work.decode.num_seqs)
        logits = self._logits[:wanted]
        if wanted > len(logits):  # guesses come on top of the sequences
            logits = self._logits.new_empty(wanted, self._logits.shape[1])
        if work.num_decodes:
            return self._compute_each(work.chunks, logits)
        if work.chunks and work.decode is None and self._prompts is not None and self._prompts.takes(work.chunks):
            self._prompts.compute(work.chunks)
        elif work.chunks:
            batch = self.batch(work.chunks, 0)
            if work.decode is not None:
                batch = self._join(work.decode, batch)
            self.forward(batch, work.chunks, batch.num_decodes, logits)
        elif work.decode is not None:
            size = self._begin(work.decode)
            shared = self._shared(work.decode, size)
            blocks = self._width if shared is not None else self._blocks_for(size, work.decode.longest)
            launch = (0, 0) if shared is None else shared.launch
            self._forwards.run((size, blocks, *launch), lambda: self._forward(size, blocks, shared))
        if work.decode is not None and work.decode.num_beams:
            self._take_steps(logits)
        return logits

    def _takes_rows(self, schedule: Schedule) -> bool:
        """Whether a step has guesses, and every token of it is known to the host and computed as one that decodes."""
        if not schedule.extended or schedule.prefills:
            return False
        known = all(not (chunk.sequence.num_pending or chunk.group.device) for chunk in schedule.decodes)
        num_tokens = sum(len(chunk.token_ids) for chunk in schedule.chunks)
        return known and num_tokens <= len(self._tokens.rows)

    def _compute_each(self, chunks: list[ChunkWork], out: Tensor) -> Tensor:
        """Compute each token of ``chunks`` as one of a sequence of its own; returns the logits that are wanted."""
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        wanted = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logits, end)]
        size = padded_size(ends[-1])
        blocks = self._blocks_for(size, max(chunk.end for chunk in chunks))
        self._tokens.write(chunks, self._sampling or [{}] * len(chunks), size, blocks)
        self._sampling, self._each = [], (size, wanted)
        self._forwards.run((size, blocks, "each"), lambda: self._forward_each(size, blocks))
        if len(wanted) == ends[-1]:
            return self._logits[: len(wanted)]
        return out.copy_(self._logits[self._numbers(wanted, torch.int64)])

    def _take_steps(self, logits: Tensor) -> None:
        """Let the searches that the device decides take a step, rows and blocks included."""
        if self._ranks is not None and self._ranks.rank:
            self._beams.fork()
            return
        beams = [chunk for chunk in self._decodes if chunk.group.device]
        groups = list(dict.fromkeys(chunk.group for chunk in beams))
        searches = [group.device.search for group in groups]
        recorded = logits.data_ptr() == self._logits.data_ptr()
        places = [chunk.row for chunk in beams]
        chosen = self._beams.choose(self._logits if recorded else logits, places, searches, recorded=recorded)
        self._books.note_drawn(beams)
        self._choices = groups, chosen

    def _join(self, work: DecodeWork, prefill: Batch) -> Batch:
        """Make one batch of decoding sequences and of chunks of prompts, without a graph: weights are read once."""
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

    # --- from logits to tokens ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def draw(self, logits: Tensor, draws: list[Chunk]) -> Drawn:
        owners = [(draw.group, draw.sequence) for draw in draws]
        masks = masks_of(owners, logits.shape[1], self._device)  # while the device still computes the logits
        note_empty(owners, masks)
        unusual = any(group.params.logit_bias or group.params.logits_processor is not None for group, _ in owners)
        if len(logits) > len(self._decodes) or unusual:
            return self._draw_from(logits, draws, masks)
        size, masked = self._size, bool(masks.rows)
        if masked:
            self._send(masks, [draw.row for draw in draws])
        penalised = any(group.params.has_penalties for group, _ in owners)
        # Where nobody wants to know log-probabilities, they only tell of NaN.
        wanted = _wants_logprobs(draws)
        told, listed = (penalised or masked) and wanted, num_listed(draws, logits.shape[1]) if wanted else 0
        work = partial(self._draw, size, penalised=penalised, masked=masked, told=told, listed=listed)
        found = self._draws.run((size, penalised, masked, told, listed), work)
        self._books.note_drawn(draws)
        for observer in self.observers:
            observer.end()
        # Rows of another method may lie between.
        return self._drawn(draws, found, [draw.row for draw in draws], wanted, may_compute_ahead=True)

    @torch.inference_mode()
    def draw_each(self, draws: list[Chunk], holders: list[Sequence]) -> Drawn | None:
        """Draw from rows of a step that computed each token as a decode; None if it did not, or logits need processing.

        Args:
            draws: of sequences that may never exist, those that ``holders`` become if draft tokens are accepted.
        """
        if self._each is None or any(needs_processing(draw.group, draw.sequence) for draw in draws):
            return None
        self._books.outdate(holders)  # they have no penalties
        (size, wanted), listed = self._each, num_listed(draws, self._logits.shape[1])
        found = self._draws.run((size, "each", listed), lambda: self._draw_each(size, listed))
        rows = [wanted[draw.row] for draw in draws]
        return self._drawn(draws, found, rows, _wants_logprobs(draws), may_compute_ahead=False)

    def _drawn(
        self, draws: list[Chunk], found: Found, rows: list[int], wants_logprobs: bool, *, may_compute_ahead: bool
    ) -> Drawn:
        """The draws from ``rows``, in ascending order, of those that a graph has computed."""
        at: slice | Tensor = slice(rows[0], rows[-1] + 1)
        if rows[-1] - rows[0] >= len(rows):
            at = self._numbers(rows, torch.int64)
        tokens, logprobs, *listed = (tensor[at] for tensor in found)
        logits, ahead = self._logits[at], may_compute_ahead and _ahead(draws)
        if wants_logprobs:
            logits = self.as_drawn_from(logits)
        ways = {"may_run_ahead": ahead, "may_compute_ahead": may_compute_ahead}
        return Drawn(draws, tokens, logprobs, logits, listed, **ways)

    def _draw_from(self, logits: Tensor, draws: list[Chunk], masks: Masks) -> Drawn:
        """Draw from any rows of logits, one operation after the other."""
        rows = self._books.rows_for(draws, self._decodes)
        self._count_tokens()
        self._change(*self._books.take_changes())
        raw = processed = self.as_drawn_from(logits[self._numbers([draw.row for draw in draws], torch.int64)])
        indices = self._numbers([row.index for row in rows], torch.int32)
        params = [draw.group.params for draw in draws]
        if masks.rows or any(p.has_penalties or p.logit_bias or p.logits_processor is not None for p in params):
            processed = raw.to(torch.float32, copy=True)
            biases = [(row, bias) for row, p in enumerate(params) for bias in (p.logit_bias or {}).items()]
            if biases:
                at = self._numbers([row * raw.shape[1] + token_id for row, (token_id, _) in biases], torch.int64)
                processed.view(-1).index_add_(0, at, self._numbers([bias for _, (_, bias) in biases], torch.float32))
            if any(p.has_penalties for p in params):
                kernels.penalise(processed, self._words, self._counts, indices, processed)
            masks.apply(processed)
            run_processors(processed, [(draw.group, draw.sequence) for draw in draws], masks)
        tokens = draw_tokens(processed, draws)
        kernels.end_decode(self._words, self._counts, indices, tokens)
        self._books.note_drawn(draws)
        logprobs = kernels.log_probabilities(raw, tokens)
        return Drawn(draws, tokens, logprobs, raw, may_run_ahead=_ahead(draws), may_compute_ahead=True)

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        if self._prompts is not None:
            try:
                if self._prompts.record_next():
                    return True
            except torch.OutOfMemoryError:  # by others on the device: prompts are launched one by one, as long ones are
                self._prompts = None
        return super().prepare_ahead()

    def give_up(self, sequences: list[Sequence]) -> None:
        self._books.give_up(sequences)

    def take_choices(self) -> tuple[list[SequenceGroup], Chosen] | None:
        """What the device has chosen in the last step, once: the groups whose sequences have forked, and how."""
        choices, self._choices = self._choices, None
        return choices

    def rehearsals(self) -> list[Callable[[], object]]:
        """The parts of a first request's work, which do not depend on each other; its numbers are meaningless."""
        chunk = ChunkWork([0] * _REHEARSED, 0, [0] * -(-_REHEARSED // self.block_size), _REHEARSED, 1)
        row = torch.zeros(1, self._logits.shape[1], dtype=self.model.dtype, device=self._device)
        return [
            lambda: self.compute(StepWork(HostMoves(), [], None, [chunk], 0)),
            lambda: self._forward(1, self._blocks_for(1, _REHEARSED), None),
            lambda: self._draw(1, penalised=False, masked=False, told=False, listed=0),
            lambda: kernels.log_probabilities(row, row.argmax(-1)),
        ]

    def forget(self) -> None:
        super().forget()
        self._books.forget()
        self._beams.forget()
        self._choices = None
        self._sampling, self._each = [], None
        self._told_places = []

    def close(self) -> None:
        super().close()
        self._forwards.clear()
        self._draws.clear()
        self._beams.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _count_tokens(self) -> None:
        """Begin to count the tokens of sequences that have taken rows, for their penalties."""
        for row, sequence in self._books.take_counted():
            counts = torch.zeros(self._logits.shape[1], dtype=torch.int32)
            counts[torch.tensor(sequence.token_ids[: sequence.num_prompt_tokens])] = 1
            generated = torch.tensor(sequence.output_token_ids, dtype=torch.int64)
            counts.index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))
            self._counts[row] = counts.to(self._device)

    def _numbers(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return to_device(values, dtype, self._device)

    def _begin(self, work: DecodeWork) -> int:
        """Write down the changes. Returns the number of rows, padding included."""
        self._change(work.changed, work.values)
        if work.rows is not None:
            self._size = len(work.rows)
            self._rows[: self._size].copy_(self._numbers(work.rows, torch.int32))
        if work.num_beams:
            self._beams.begin(work.beam_rows)
        return self._size

    def _change(self, places: list[int], values: list[int]) -> None:
        if places:
            source = torch.tensor([places, values], pin_memory=self._pinned)
            at, words = source.to(self._device, non_blocking=True)
            self._words.view(-1)[at] = words.to(torch.int32)

    def _send(self, masks: Masks, rows: list[int]) -> None:
        """Send masks; ``rows`` are the rows of logits that their rows mean."""
        places = [-1] * self._size
        for row, place in zip(rows, masks.places(len(rows)), strict=True):
            places[row] = place
        if places != self._told_places:
            self._mask_places[: self._size].copy_(self._numbers(places, torch.int32))
            self._told_places = places
        self._masks[: len(masks.words)].copy_(masks.words, non_blocking=True)

    def _blocks_for(self, size: int, longest: int) -> int:
        """The columns of the block tables with which ``size`` sequences are computed.

        Attention is cut into as many parts as tables so wide may need, and parts without tokens cost time, too: with
        tables of 4,096 tokens a step of the 8b in q4_k_m and one context of 300 takes 4 % longer.
        """
        if self._shape.num_parts(size) <= SHORTEST // self._shape.tile:
            return self._width  # as many at any length
        return -(-padded_length(longest, self._width * self.block_size) // self.block_size)

    def _shared(self, work: DecodeWork, size: int) -> WorkList | None:
        """The step's work list, on the device; None where reading shared blocks once is not worth it."""
        if work.plan is not None:
            self._work_list = self._work_list.fill(Plan(*work.plan))
        return self._work_list.first(size) if work.shares_blocks else None

    # --- recorded in graphs -------------------------------------------------------------------------------------------

    def _gather_inputs(self, size: int) -> DecodeInputs:
        inputs = self._inputs.first(size)
        kernels.begin_decode(self._words, self._rows[:size], self.block_size, inputs)
        if self._ranks is not None:
            self._ranks.broadcast(inputs.token_ids)
        return inputs

    def _forward(self, size: int, blocks: int, shared: WorkList | None) -> None:
        self._forward_inputs(self._gather_inputs(size), size, blocks, shared)

    def _forward_inputs(self, inputs: DecodeInputs, size: int, blocks: int, shared: WorkList | None) -> None:
        tables = inputs.block_tables[:, :blocks]
        tensors = inputs.token_ids, inputs.positions, inputs.slot_mapping, tables, inputs.context_lens
        batch = Batch(*tensors, num_decodes=size, cu_seqlens=inputs.context_lens[:0], shared=shared)
        self.model.forward(batch, self.kv_cache, out=self._logits[:size])

    def _forward_each(self, size: int, blocks: int) -> None:
        inputs, words = self._inputs.first(size), self._tokens.words(size, blocks)
        inputs = inputs._replace(block_tables=inputs.block_tables[:, :blocks])
        kernels.begin_decode(words, self._tokens.rows[:size], self.block_size, inputs)
        self._forward_inputs(inputs, size, blocks, None)

    def _draw_each(self, size: int, listed: int) -> Found:
        raw = self.as_drawn_from(self._logits[:size])
        return *kernels.sample_with_logprobs(raw, self._inputs.first(size).sampling), *_list(raw, listed)

    def _draw(self, size: int, *, penalised: bool, masked: bool, told: bool, listed: int) -> Found:
        inputs, rows, raw = self._inputs.first(size), self._rows[:size], self.as_drawn_from(self._logits[:size])
        logits = raw
        if penalised:
            logits = torch.empty_like(raw, dtype=torch.float32)
            kernels.penalise(raw, self._words, self._counts, rows, logits)
        if masked:
            possible = torch.empty_like(logits) if logits is raw else logits
            kernels.mask_logits(logits, self._mask_places[:size], self._masks, possible)
            logits = possible
        tokens, logprobs = kernels.sample_with_logprobs(logits, inputs.sampling)
        kernels.end_decode(self._words, self._counts, rows, tokens)
        return tokens, kernels.log_probabilities(raw, tokens) if told else logprobs, *_list(raw, listed)


def _wants_logprobs(draws: list[Chunk]) -> bool:
    return any(draw.group.params.logprobs is not None for draw in draws)


def _list(logits: Tensor, count: int) -> tuple[Tensor, ...]:
    """The log-probabilities and ids of the ``count`` most probable tokens of each row, if there are any to list."""
    return kernels.top_log_probabilities(logits, count) if count else ()


def _sampling(chunk: Chunk) -> dict[int, int]:
    """The words that decide what is drawn behind a chunk."""
    params = chunk.group.params
    return sampling_words(params, chunk.sequence) if isinstance(params, SamplingParams) else {}


def _ahead(draws: list[Chunk]) -> bool:
    """Whether the next step may be launched before the host has seen the tokens of these."""
    return not any(needs_tokens(draw.group, draw.sequence) for draw in draws)


def num_listed(draws: SequenceOf[Chunk], vocab: int) -> int:
    """How many of the most probable tokens a graph finds of each row: none where nobody wants any, or somebody many."""
    most = max((c for draw in draws if 0 < (c := draw.group.params.logprobs or 0) <= MANY), default=0)
    return next((min(count, vocab) for count in _LISTED if count >= most), 0) if most else 0
