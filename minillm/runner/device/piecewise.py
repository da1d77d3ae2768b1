"""Piecewise CUDA graphs for steps with prompts of up to a thousand tokens, alone or next to decoding sequences.

The CPU takes longer to launch such a step kernel by kernel than the GPU to compute it. An 8B model needs 344 launches,
13 to 37 ms, for 10.8 ms of work with 512 tokens. The work between the attention of one layer and of the next (a piece)
depends only on the number of tokens. So each piece is a graph, recorded for each padded number of tokens. Attention
depends on the sequences and is launched without a graph. Padding tokens are computed but ignored; attention never reads
them.

A graph's key is the padded number of tokens and the piece's index. Piece i follows the attention of layer i. Piece -1,
with the embedding, comes before the first attention.
"""

from collections.abc import Hashable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from minillm.kernels import KVCache
from minillm.model.kinds import to_compute
from minillm.model.llama import Batch, Llama
from minillm.runner.device.ahead import Ahead, Shape
from minillm.runner.device.graphs import Graphs

MOST_TOKENS = 1024
_OFTEN = 8  # steps that are launched kernel by kernel before graphs are recorded while requests run
_UNIT = 64  # padded sizes are multiples of this: cuBLAS computes whole tiles of 64 to 256 tokens anyway


class PiecewiseForward:
    """The forward pass of steps of up to `MOST_TOKENS` tokens, as a series of CUDA graphs.

    Attention runs between the graphs: there is one graph for the work from one layer's attention to the next. The
    graphs read and write fixed buffers ``[MOST_TOKENS, columns]``.
    """

    def __init__(self, model: Llama, kv_cache: KVCache, graphs: Graphs, ahead: Ahead) -> None:
        self._ahead = ahead
        self._model, self._kv_cache, self._graphs = model, kv_cache, graphs
        c, device = model.config, model.device

        def buffer(columns: int) -> Tensor:
            return torch.zeros(MOST_TOKENS, columns, dtype=model.dtype, device=device)

        self._token_ids = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device)
        self._x, self._attended = buffer(c.hidden_size), buffer(c.num_heads * c.head_dim)
        self._qkv = buffer((c.num_heads + 2 * c.num_kv_heads) * c.head_dim)

    def hidden(self, batch: Batch) -> Tensor:
        """Compute a batch. Write its K and V, and return the last layer's output ``[num_tokens, hidden]``."""
        model, count = self._model, len(batch.token_ids)
        if count > MOST_TOKENS:
            return model.hidden(batch, self._kv_cache)
        size = self._recorded_size(-(-count // _UNIT) * _UNIT)
        if not size:
            return model.hidden(batch, self._kv_cache)
        self._token_ids[:count].copy_(batch.token_ids)
        steps = model.steps(batch, self._kv_cache.layers[0])
        self._run(size, -1)
        for index, (layer, cache) in enumerate(zip(model.layers, self._kv_cache.layers, strict=True)):
            attended = model.attend(self._qkv[:count], cache, batch, layer, *steps[layer.attention])
            self._attended[:count].copy_(attended)
            self._run(size, index)
        return self._x[:count]

    def shapes(self) -> Iterator[Shape]:
        """Yield one shape for every padded number of tokens in a step."""
        for size in range(_UNIT, MOST_TOKENS + 1, _UNIT):
            yield Shape(partial(self._compute, size), partial(self._record, size))

    def _recorded_size(self, size: int) -> int:
        """Return a padded size with recorded graphs: ``size``, recorded now if that is allowed, or a larger one.

        Return 0 if no such size has graphs.
        """
        if not self._graphs.lacks(_key(size, -1)):
            return size
        larger = range(size + _UNIT, min(2 * size, MOST_TOKENS) + 1, _UNIT)
        if self._ahead.must_not_wait and (found := [n for n in larger if not self._graphs.lacks(_key(n, -1))]):
            return found[0]
        key = _key(size, -1)
        return size if self._ahead.record(partial(self._record, size), partial(self._compute, size), key, _OFTEN) else 0

    def _record(self, size: int) -> None:
        """Record the graphs of all pieces for ``size`` tokens. The contents of the buffers do not matter."""
        self._graphs.record_all({_key(size, index): partial(self._piece, size, index) for index in self._indices()})

    def _compute(self, size: int) -> None:
        for index in self._indices():
            self._piece(size, index)

    def _indices(self) -> range:
        """Return the indices of a forward pass's pieces in the order of recording.

        Piece -1 is recorded last. So if a size has a graph of piece -1, all graphs of this size exist.
        """
        return range(len(self._model.layers) - 1, -2, -1)

    @cached_property
    def _kinds(self) -> dict[int, Hashable]:
        """The kind of each piece, by index: the kinds of the two layers that it belongs to."""
        layers = [None, *(layer.kind for layer in self._model.layers), None]
        return {index: (layers[index + 1], layers[index + 2]) for index in self._indices()}

    def _run(self, size: int, index: int) -> None:
        self._graphs.run(_key(size, index), partial(self._piece, size, index))

    def _piece(self, size: int, index: int) -> None:
        """Compute piece ``index``: everything after the attention of layer ``index``, up to q, k and v of layer ``index
        + 1``.
        """
        if index not in to_compute(self._indices(), self._kinds.__getitem__):
            return
        model, x, layers = self._model, self._x[:size], self._model.layers
        if index < 0:
            x.copy_(model.embed(self._token_ids[:size]))
        else:
            result = model.finish(self._attended[:size], layers[index], x)
            if result.data_ptr() != x.data_ptr():
                x.copy_(result)
        if index + 1 < len(layers):
            model.project(x, layers[index + 1], self._qkv[:size])


def _key(size: int, index: int) -> tuple[str, int, int]:
    return "piece", size, index
