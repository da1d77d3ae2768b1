"""The state of decoding sequences on the device, and the buffers and graphs that all kinds of steps share."""

from typing import Any

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import AttentionShape, Costs, DecodeInputs, Field, KVCache, WorkList
from minillm.model.llama import Batch, Llama
from minillm.model.shard import ranks_of
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.rows import SHORTEST, Rows, Sharing, padded_length, padded_size
from minillm.runner.device.token_rows import MOST_TOKENS, TokenRows
from minillm.runner.device.work import DecodeWork
from minillm.runner.drawn import Drawn
from minillm.runner.masks import needs_tokens
from minillm.runner.to_device import to_device
from minillm.sequence import Chunk

# For each row: drawn token, its log-probability, and if listed, log-probabilities and ids of the most probable tokens.
Found = tuple[Tensor, ...]


def attention_shape(model: Llama) -> AttentionShape:
    """Return the properties of a model (or of a rank's part) and its device that decide how attention is split."""
    c, processors = model.local, 1
    if model.device.type == "cuda":
        processors = torch.cuda.get_device_properties(model.device).multi_processor_count
    row = c.kv_bytes_per_token(model.kv_element_size) // (2 * c.num_layers * c.num_kv_heads)
    return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, model.dtype.itemsize, processors, row)


def decode_bytes(model: Llama, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Return the bytes that a `DeviceRunner` keeps on the device, in addition to weights and pool.

    They hold logits, counts of tokens for penalties, block tables (twice), and partial results of attention.
    """
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


def _capacity(max_num_seqs: int) -> int:
    """Return the maximum number of tokens, padding included, of a step that decodes or verifies draft tokens."""
    return padded_size(max(max_num_seqs, MOST_TOKENS))


class DeviceState:
    """The state of decoding sequences, the inputs and logits of a step, and the graphs that read and write them.

    The tensors are allocated once, since graphs record their addresses.

    Attributes:
        words: ``[max_num_seqs, words]`` int32, a row for each sequence; `minillm.kernels.Field` names the columns.
        rows: ``[capacity]`` int32, the rows of ``words`` in this step, -1 for padding. The first ``size`` are used.
        counts: ``[max_num_seqs, vocab]`` int32, each sequence's counts of tokens, for penalties; the encoding is that
            of `kernels.decode_state.reference.penalize`.
        logits: ``[capacity, vocab]`` in the model's dtype.
        cpu_rows: the CPU's record of the rows.
    """

    def __init__(
        self,
        model: Llama,
        kv_cache: KVCache,
        block_size: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        graphs: bool,
        sharing: Costs | None,
    ) -> None:
        self.model, self.kv_cache, self.block_size = model, kv_cache, block_size
        self.device = model.device
        self.width, self.capacity = -(-max_model_len // block_size), _capacity(max_num_seqs)
        self.shape, self.ranks = attention_shape(model), ranks_of(model)
        draws = self.ranks is None or self.ranks.rank == 0
        vocab = model.config.vocab_size if draws else 0
        self.words = torch.zeros(max_num_seqs, Field.TABLE + self.width, dtype=torch.int32, device=self.device)
        self.inputs = DecodeInputs.allocate(self.capacity, self.width, self.device)
        self.rows = torch.full((self.capacity,), -1, dtype=torch.int32, device=self.device)
        self.size = 0
        self.counts = torch.zeros(max_num_seqs, vocab, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(self.capacity, vocab, dtype=model.dtype, device=self.device)
        self.tokens = TokenRows(padded_size(MOST_TOKENS), self.width, self.device, pinned=graphs)
        self.forwards = Graphs(self.rows, self.tokens.rows, enabled=graphs)
        self.draws = Graphs(self.rows, self.tokens.rows, enabled=graphs)
        plans = None if sharing is None else Sharing(self.shape, sharing)
        self.cpu_rows = Rows(max_num_seqs, self.words.shape[1], block_size, plans)

    @property
    def vocab(self) -> int:
        """Return the size of the vocabulary; 0 on a rank that draws no tokens."""
        return self.logits.shape[1]

    def close(self) -> None:
        """Discard all graphs."""
        self.forwards.clear()
        self.draws.clear()

    def numbers(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        """Return ``values`` as a tensor on the device, without waiting for the device."""
        return to_device(values, dtype, self.device)

    def begin(self, work: DecodeWork) -> int:
        """Send a step's changed words and list of rows to the device. Return the number of rows, with padding."""
        self.change(work.changed, work.values)
        if work.rows is not None:
            self.size = len(work.rows)
            self.rows[: self.size].copy_(self.numbers(work.rows, torch.int32))
        return self.size

    def change(self, indices: list[int], values: list[int]) -> None:
        """Write ``values`` to ``words`` at the flat indices ``indices``."""
        if indices:
            source = torch.tensor([indices, values], pin_memory=self.tokens.pinned)
            at, words = source.to(self.device, non_blocking=True)
            self.words.view(-1)[at] = words.to(torch.int32)

    def count_tokens(self) -> None:
        """Initialize the token counts of sequences with penalties that have just taken a row."""
        for row, sequence in self.cpu_rows.take_counted():
            counts = torch.zeros(self.vocab, dtype=torch.int32)
            counts[torch.tensor(sequence.token_ids[: sequence.num_prompt_tokens])] = 1
            generated = torch.tensor(sequence.output_token_ids, dtype=torch.int64)
            counts.index_add_(0, generated, torch.full_like(generated, 2, dtype=torch.int32))
            self.counts[row] = counts.to(self.device)

    def blocks_for(self, size: int, longest: int) -> int:
        """Return the width, in blocks, of the block tables for a step of ``size`` sequences.

        Attention is split into as many parts as a table of that width may need, and parts without tokens cost time. (An
        8B model in q4_k_m, with one context of 300 tokens, takes 4 % longer per step with tables of 4,096 tokens.)
        """
        if self.shape.num_parts(size) <= SHORTEST // self.shape.tile:
            return self.width  # the number of parts is the same at any length
        return -(-padded_length(longest, self.width * self.block_size) // self.block_size)

    def gather(self, size: int) -> DecodeInputs:
        """Gather the model's inputs from the first ``size`` rows. Rank 0 sends its token ids to the other ranks."""
        inputs = self.inputs.first(size)
        kernels.begin_decode(self.words, self.rows[:size], self.block_size, inputs)
        if self.ranks is not None:
            self.ranks.broadcast(inputs.token_ids)
        return inputs

    def forward(self, inputs: DecodeInputs, size: int, blocks: int, shared: WorkList | None) -> None:
        """Compute the last token of ``size`` sequences, and write ``logits``. ``blocks``: width of the block tables."""
        tables = inputs.block_tables[:, :blocks]
        tensors = inputs.token_ids, inputs.positions, inputs.slot_mapping, tables, inputs.context_lens
        batch = Batch(*tensors, num_decodes=size, cu_seqlens=inputs.context_lens[:0], shared=shared)
        self.model.forward(batch, self.kv_cache, out=self.logits[:size])

    def as_drawn_from(self, logits: Tensor) -> Tensor:
        """See `Runner.as_drawn_from`."""
        return logits.float() if self.model.is_deterministic else logits

    def drawn(
        self, draws: list[Chunk], found: Found, rows: list[int], wants_logprobs: bool, *, may_compute_ahead: bool
    ) -> Drawn:
        """Return the results of a draw as `Drawn`.

        Args:
            found: the tensors that the draw has written, one row for each row of logits.
            rows: each draw's row of ``found``, in ascending order.
        """
        at: slice | Tensor = slice(rows[0], rows[-1] + 1)
        if rows[-1] - rows[0] >= len(rows):
            at = self.numbers(rows, torch.int64)
        tokens, logprobs, *listed = (tensor[at] for tensor in found)
        logits, ahead = self.logits[at], may_compute_ahead and runs_ahead(draws)
        if wants_logprobs:
            logits = self.as_drawn_from(logits)
        ways = {"may_run_ahead": ahead, "may_compute_ahead": may_compute_ahead}
        return Drawn(draws, tokens, logprobs, logits, listed, **ways)


def runs_ahead(draws: list[Chunk]) -> bool:
    """Return whether the next step may be launched before the CPU has seen the tokens of these draws."""
    return not any(needs_tokens(draw.group, draw.sequence) for draw in draws)
