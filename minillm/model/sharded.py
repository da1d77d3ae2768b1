"""One rank's part of a Llama that several ranks share: see `minillm.model.shard` for which part.

The products behind o and down are parts of sums that run over the ranks, and so is the embedding; the logits are parts
of rows, which rank 0 gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import functional

from minillm import kernels
from minillm.kernels import LinearWeight
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.shard import Shard
from minillm.parallel.collectives import Ranks


@dataclass(frozen=True)
class ShardedLlama(Llama):
    """A `Llama` whose weights are the shard's. All ranks compute the same batch; rank 0 alone returns all logits."""

    shard: Shard
    ranks: Ranks

    @cached_property
    def local(self) -> ModelConfig:
        return self.shard.local(self.config)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Each rank looks up the tokens of its part of the vocabulary; the others give zeros."""
        vocab = self.shard.vocab
        elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        x = functional.embedding((token_ids - vocab.start).masked_fill_(elsewhere, 0), self.embedding)
        return self.ranks.all_reduce(x.masked_fill_(elsewhere[:, None], 0))

    def _linear_add(self, x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
        """Rank 0 adds the residual."""
        first = self.ranks.rank == 0
        return self.ranks.all_reduce(kernels.linear_add(x, weight, residual) if first else kernels.linear(x, weight))

    def _logits(self, x: Tensor, out: Tensor | None) -> Tensor:
        """On rank 0 ``[num_logits, vocab]``, on the others their ``[num_logits, vocab of the shard]``."""
        part = super()._logits(x, None)
        vocab, width = self.config.vocab_size, part.shape[1]
        parts = self.ranks.all_gather(part) if len(part) else part.new_empty(self.ranks.size, 0, width)
        if self.ranks.rank:
            return part
        logits = part.new_empty(part.shape[0], vocab) if out is None else out
        for number, each in enumerate(parts):
            logits[:, number * width : (number + 1) * width] = each[:, : max(0, vocab - number * width)]
        return logits


def ranks_of(model: Llama) -> Ranks | None:
    """The processes that share the model; None where it is whole."""
    return model.ranks if isinstance(model, ShardedLlama) else None
