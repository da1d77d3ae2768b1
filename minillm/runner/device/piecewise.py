"""Steps with prompts of up to a thousand tokens, alone or next to decoding sequences, as piecewise CUDA graphs.

Launching such a step kernel by kernel takes the CPU longer than the GPU needs to compute it: an 8B model is 344
launches, 13 to 37 ms, for 10.8 ms of work with 512 tokens. Everything between the attentions of two layers depends only
on the number of tokens, so it is one graph per layer, recorded for padded numbers of tokens. Attention depends on the
sequences and is launched. Padding tokens are computed and ignored; attention never reads them.

A graph's key is the padded number of tokens and the layer whose attention precedes it, -1 for none.
"""

from functools import partial

import torch
from torch import Tensor

from minillm.kernels import KVCache
from minillm.model.llama import Batch, Llama
from minillm.runner.device.graphs import Graphs

MOST_TOKENS = 1024
_UNIT = 64  # sizes are multiples: cuBLAS computes whole tiles of 64 to 256 tokens anyway


class PiecewiseForward:
    """The buffers of such steps, ``[MOST_TOKENS, columns]`` each, and the graphs that read and write them."""

    def __init__(self, model: Llama, kv_cache: KVCache, graphs: Graphs) -> None:
        self._model, self._kv_cache, self._graphs = model, kv_cache, graphs
        c, device = model.config, model.device

        def buffer(columns: int) -> Tensor:
            return torch.zeros(MOST_TOKENS, columns, dtype=model.dtype, device=device)

        self._token_ids = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device)
        self._x, self._attended = buffer(c.hidden_size), buffer(c.num_heads * c.head_dim)
        self._qkv = buffer((c.num_heads + 2 * c.num_kv_heads) * c.head_dim)

    def hidden(self, batch: Batch) -> Tensor:
        """Write K and V of a batch's tokens; return the last layer's output ``[num_tokens, hidden]``."""
        model, count = self._model, len(batch.token_ids)
        if count > MOST_TOKENS:
            return model.hidden(batch, self._kv_cache)
        size = -(-count // _UNIT) * _UNIT
        if self._graphs.lacks(_key(size, -1)):
            for index in self._indices():  # on whatever the buffers contain
                self._run(size, index)
        self._token_ids[:count].copy_(batch.token_ids)
        steps = model.steps(batch, self._kv_cache.layers[0])
        self._run(size, -1)
        for index, (layer, cache) in enumerate(zip(model.layers, self._kv_cache.layers, strict=True)):
            attended = model.attend(self._qkv[:count], cache, batch, layer, *steps[layer.attention])
            self._attended[:count].copy_(attended)
            self._run(size, index)
        return self._x[:count]

    def record_next(self) -> bool:
        """Record one graph that is missing, of the smallest size; return False if none is."""
        for size in range(_UNIT, MOST_TOKENS + 1, _UNIT):
            for index in self._indices():
                if self._graphs.lacks(_key(size, index)):
                    self._run(size, index)
                    return True
        return False

    def _indices(self) -> range:
        """Return the pieces of a forward pass in the order of recording: if the first one exists, all do."""
        return range(len(self._model.layers) - 1, -2, -1)

    def _run(self, size: int, index: int) -> None:
        self._graphs.run(_key(size, index), partial(self._piece, size, index))

    def _piece(self, size: int, index: int) -> None:
        """Compute from the result of the attention of layer ``index`` to q, k and v of the next layer."""
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
