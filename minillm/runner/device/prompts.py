"""CUDA graphs for steps of short prompts, which the GPU computes faster than the CPU can launch their kernels.

A model of 30 layers needs some 300 launches, which take 6 to 20 ms of CPU time. A small model computes a prompt of a
few hundred tokens in less than 2 ms. There is a graph for each padded number of tokens and of sequences. Graphs of
single prompts are recorded while the engine is idle. Padding tokens belong to no sequence, and their K and V are not
written. Padding sequences have no tokens.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.kernels import FP8, KVCache
from minillm.model.llama import Batch, Llama
from minillm.runner.device.ahead import Ahead, Shape
from minillm.runner.device.graphs import Graphs
from minillm.runner.device.rows import padded_size
from minillm.runner.step import ChunkWork, Packed, packed
from minillm.runner.to_device import to_device

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens
_MOST_SEQS = 64
_OFTEN = 8  # steps of a shape that are launched kernel by kernel before it is recorded while requests run
# Tokens times parameters: 6 ms on an H100, as long as a fast CPU needs for the launches. FP8 takes half as long.
_MOST_WORK = 1 << 41
_MOST_IN_8_BITS = 192  # tokens with an 8-bit cache: for longer chunks whole contexts are dequantized


class ShortPrompts:
    """The device's input buffers for steps of short prompts, and the recording of their graphs.

    Args:
        graphs: keeps the recordings, together with those of other steps, so that all share memory.
        max_num_seqs: maximum number of sequences in a step.
        width: number of blocks of the longest sequence.
        logits: output buffer, ``[>= padded_size(max_num_seqs), vocab]``.
    """

    def __init__(
        self,
        model: Llama,
        kv_cache: KVCache,
        block_size: int,
        graphs: Graphs,
        ahead: Ahead,
        *,
        max_num_seqs: int,
        width: int,
        logits: Tensor,
    ) -> None:
        self._model, self._kv_cache, self._block_size, self._graphs = model, kv_cache, block_size, graphs
        self._ahead = ahead
        self._logits, self._most_seqs = logits, min(max_num_seqs, _MOST_SEQS)
        most = most_tokens(model)
        self._sizes = [size for size in SIZES if size <= most]
        seqs, tokens = padded_size(self._most_seqs), max(self._sizes, default=0)
        self._numbers = torch.zeros(3 * tokens + seqs, dtype=torch.int64, device=model.device)
        self._lengths = torch.zeros(2 * seqs + 1, dtype=torch.int32, device=model.device)
        self._tables = torch.zeros(seqs, width, dtype=torch.int32, device=model.device)

    def takes(self, chunks: list[ChunkWork]) -> bool:
        """Return whether the chunks are short, and no chunk wants prompt scores or more than one row of logits."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if not self._sizes or num_tokens > self._sizes[-1] or len(chunks) > self._most_seqs:
            return False
        return all(chunk.num_logits <= 1 and not chunk.targets for chunk in chunks)

    def compute(self, chunks: list[ChunkWork]) -> bool:
        """Compute the chunks with a CUDA graph. Write their K and V, and their logits to the first rows of the output
        buffer.

        If the graph is missing, it is recorded first. If it may not be recorded now (`Ahead.record`), compute nothing
        and return False.
        """
        numbers = packed(chunks, 0, self._block_size)
        tokens = next(size for size in self._sizes if size >= len(numbers.token_ids))
        key = _key(tokens, padded_size(len(chunks)))
        if self._graphs.lacks(key) and self._ahead.must_not_wait:
            key = self._graphs.recorded(partial(_fits, key)) or key
        run, forward = partial(self._run, numbers, *key[1:]), partial(self._forward, *key[1:])
        if self._graphs.lacks(key):
            return self._ahead.record(run, forward, key, _OFTEN)
        run()
        return True

    def shapes(self) -> Iterator[Shape]:
        """Yield one shape for every padded length of a single prompt."""
        for tokens in self._sizes:
            yield Shape(partial(self._forward, tokens, 1), partial(self._record, tokens))

    def _record(self, tokens: int) -> None:
        self._fill(packed([], 0, self._block_size), tokens, 1)
        self._graphs.record(_key(tokens, 1), partial(self._forward, tokens, 1))

    def _run(self, numbers: Packed, tokens: int, seqs: int) -> None:
        self._fill(numbers, tokens, seqs)
        self._graphs.run(_key(tokens, seqs), partial(self._forward, tokens, seqs))

    def _fill(self, numbers: Packed, tokens: int, seqs: int) -> None:
        """Send the inputs, padded to ``tokens`` tokens and ``seqs`` sequences."""
        count = len(numbers.tables)
        if count:
            tables = to_device(numbers.tables, torch.int32, self._tables.device)
            self._tables[:count, : tables.shape[1]] = tables
        lacking, none = [0] * (tokens - len(numbers.token_ids)), [0] * (seqs - count)
        slots = [*numbers.slots.tolist(), *[-1] * len(lacking)]
        rows = numbers.logit_rows + [0] * (seqs - len(numbers.logit_rows))
        positions = numbers.positions.tolist()
        self._send(self._numbers, [*numbers.token_ids, *lacking, *positions, *lacking, *slots, *rows])
        starts = numbers.starts + numbers.starts[-1:] * len(none)
        self._send(self._lengths, [*starts, *numbers.lengths, *none])

    def _send(self, to: Tensor, values: list[int]) -> None:
        to[: len(values)] = to_device(values, to.dtype, to.device)

    def _forward(self, tokens: int, seqs: int) -> None:
        token_ids, positions, slot_mapping = self._numbers[: 3 * tokens].view(3, tokens)
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=self._tables[:seqs],
            context_lens=self._lengths[seqs + 1 : 2 * seqs + 1],
            num_decodes=0,
            cu_seqlens=self._lengths[: seqs + 1],
            logit_rows=self._numbers[3 * tokens : 3 * tokens + seqs],
        )
        self._model.forward(batch, self._kv_cache, self._logits[:seqs])


def _key(tokens: int, seqs: int) -> tuple[str, int, int]:
    return "prompts", tokens, seqs


def _fits(key: tuple[str, int, int], recorded: tuple[Any, ...]) -> bool:
    """Return whether a graph of key ``recorded`` can compute a step of ``key`` at up to twice the cost."""
    kind, tokens, seqs = key
    return recorded[0] == kind and tokens <= recorded[1] <= 2 * tokens and recorded[2] >= seqs


def most_tokens(model: Llama) -> int:
    """Return the maximum number of tokens of a step that takes longer to launch than to compute."""
    work = 2 * _MOST_WORK if any(part.layout == FP8 for part in model.layers[0].qkv.parts) else _MOST_WORK
    most = min(SIZES[-1], work // model.local.num_parameters)
    return min(most, _MOST_IN_8_BITS) if model.kv_in_8_bits else most
