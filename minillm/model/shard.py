"""The part of a model that one rank holds (tensor parallelism, Shoeybi et al. 2019).

    q, k, v, gate, up   sharded by rows: a rank computes its heads, and its columns of the gated MLP
    o, down             sharded by columns: each rank computes a partial sum, and an all-reduce adds up these sums
    embedding, head     sharded by the vocabulary
    norms               replicated. This includes the norms of q and k, which are as wide as one head

No size has to be divisible by the number of ranks. Each rank gets whole KV heads with the query heads that read them.
Some ranks get one KV head more than others. If there are more ranks than KV heads, several ranks have the same KV head,
and each has some of its query heads. All ranks get equally many rows of the vocabulary, because their logits are
gathered. The last rows are padded with zeros.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from minillm import kernels
from minillm.errors import UsageError
from minillm.kernels import HostPlan, LinearWeight, Pages
from minillm.model.config import ModelConfig
from minillm.model.llama import Layer, Llama
from minillm.parallel.collectives import Ranks

_INTERMEDIATE_UNIT = 64  # the MLP's columns are sharded in units of this size, which are whole 128-byte cache lines


@dataclass(frozen=True)
class Shard:
    """The part of a model that belongs to rank ``rank`` of ``size`` ranks, as slices of the whole model's dimensions.

    The slice ``vocab`` may extend beyond the vocabulary. The rows beyond it are zeros.
    """

    rank: int
    size: int
    heads: slice
    kv_heads: slice
    intermediate: slice
    vocab: slice

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config of this rank's part, as if it were a whole model."""
        return replace(
            config,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.intermediate),
            vocab_size=_length(self.vocab),
        )

    def part_of(self, name: str, config: ModelConfig) -> tuple[slice | None, slice | None]:
        """Return this rank's part of the parameter ``name``: a slice of its rows, and a slice of its columns.

        None means all rows or all columns.
        """
        if self.size == 1:
            return None, None
        layer, dim = name.split(".")[-2], config.head_dim
        if layer in ("embed_tokens", "lm_head"):
            return slice(*(min(end, config.vocab_size) for end in (self.vocab.start, self.vocab.stop))), None
        if layer in ("gate_proj", "up_proj"):
            return self.intermediate, None
        if layer in ("q_proj", "k_proj", "v_proj"):
            heads = self.heads if layer == "q_proj" else self.kv_heads
            return slice(heads.start * dim, heads.stop * dim), None
        if layer == "o_proj" and name.endswith(".weight"):
            return None, slice(self.heads.start * dim, self.heads.stop * dim)
        if layer == "down_proj" and name.endswith(".weight"):
            return None, self.intermediate
        return None, None

    def holds(self, name: str) -> bool:
        """Return whether this rank loads the parameter ``name``. Only rank 0 loads the biases of o and down."""
        return self.rank == 0 or not name.endswith(("o_proj.bias", "down_proj.bias"))


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """Return the model's part for rank ``rank`` of ``size`` ranks. Raises UsageError as `check_size` does."""
    check_size(config, size)
    heads, kv_heads = _heads(config, rank, size)
    unit = _INTERMEDIATE_UNIT
    while config.intermediate_size % unit or config.intermediate_size // unit < size:
        unit //= 2
    columns = _share(config.intermediate_size // unit, rank, size)
    rows = -(-config.vocab_size // size)
    intermediate, vocab = slice(columns.start * unit, columns.stop * unit), slice(rank * rows, (rank + 1) * rows)
    return Shard(rank, size, heads, kv_heads, intermediate, vocab)


def check_size(config: ModelConfig, size: int) -> None:
    """Raise UsageError if the model has fewer heads than ranks, or norms over all heads, which cannot be sharded."""
    if size > 1 and config.qk_norm == "all":
        raise UsageError(
            f"tensor_parallel_size {size}: {config.architecture} normalizes q and k over all heads, which runs on one "
            "rank only; leave tensor_parallel_size out"
        )
    most = min(config.num_heads, config.intermediate_size)
    if size > most:
        raise UsageError(
            f"tensor_parallel_size {size} is too large: the model has {most} heads to share; use fewer ranks"
        )


def _heads(config: ModelConfig, rank: int, size: int) -> tuple[slice, slice]:
    """Return the slices of query heads and KV heads that belong to a rank.

    Within the rank, each KV head serves the same number of query heads.
    """
    group = config.num_heads // config.num_kv_heads
    if size <= config.num_kv_heads:
        kv = _share(config.num_kv_heads, rank, size)
        return slice(kv.start * group, kv.stop * group), kv
    for kv_head in range(config.num_kv_heads):
        owners = _share(size, kv_head, config.num_kv_heads)
        if owners.start <= rank < owners.stop:
            part = _share(group, rank - owners.start, _length(owners))
            first = kv_head * group
            return slice(first + part.start, first + part.stop), slice(kv_head, kv_head + 1)
    raise AssertionError(f"rank {rank} is not below {size}")


def _share(count: int, index: int, parts: int) -> slice:
    """Divide ``count`` indices into ``parts`` nearly equal runs, longer runs first. Return run number ``index``."""
    each, more = divmod(count, parts)
    start = index * each + min(index, more)
    return slice(start, start + each + (index < more))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


@dataclass(frozen=True)
class ShardedLlama(Llama):
    """A `Llama` with one shard's weights. All ranks compute the same batch; only rank 0 returns all logits.

    Each rank computes partial sums of the embedding and of the matmuls with o and down. An all-reduce adds them up.
    Rank 0 gathers the logits.
    """

    shard: Shard
    ranks: Ranks

    @cached_property
    def local(self) -> ModelConfig:
        return self.shard.local(self.config)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of all tokens.

        Each rank looks up the tokens in its part of the vocabulary, and uses zeros for all other tokens. An all-reduce
        adds up the ranks' results.
        """
        vocab = self.shard.vocab
        elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        x = kernels.embedding((token_ids - vocab.start).masked_fill_(elsewhere, 0), self.embedding, self.dtype)
        x = self.ranks.all_reduce(x.masked_fill_(elsewhere[:, None], 0))
        return x if self.config.embedding_scale == 1 else x.mul_(self.config.embedding_scale)

    def _linear_add(self, x: Tensor, weight: LinearWeight, residual: Tensor) -> Tensor:
        """Return ``residual + linear(x, weight)``: the sum of all ranks' partial sums.

        Rank 0 adds the residual to its own partial sum.
        """
        first = self.ranks.rank == 0
        return self.ranks.all_reduce(self.ops.linear_add(x, weight, residual) if first else self.ops.linear(x, weight))

    def _attend_add(self, q: Tensor, pages: Pages, layer: Layer, residual: Tensor, plan: HostPlan | None) -> Tensor:
        attended = self.ops.paged_attention(q, pages, self.config.softmax_scale, plan)
        return self._linear_add(attended.flatten(1), layer.o, residual)

    def _norm_add(self, branch: Tensor, norm: Tensor, x: Tensor) -> Tensor:
        """Return ``x + norm(branch)``, where ``branch`` is the sum of all ranks' partial sums."""
        return super()._norm_add(self.ranks.all_reduce(branch), norm, x)

    def _add_mlp(self, x: Tensor, layer: Layer) -> Tensor:
        """Return ``x`` plus the MLP's result: the sum of all ranks' partial sums. Rank 0's sum includes ``x``."""
        if layer.mlp_output_norm is not None:
            return super()._add_mlp(x, layer)
        return self.ranks.all_reduce(self._mlp(x, layer, x if self.ranks.rank == 0 else None))

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return all logits ``[num_logits, vocab]`` on rank 0. On other ranks, return only those of their own shard."""
        part = super().logits(x)
        vocab, width = self.config.vocab_size, part.shape[1]
        parts = self.ranks.all_gather(part) if len(part) else part.new_empty(self.ranks.size, 0, width)
        if self.ranks.rank:
            return part
        logits = part.new_empty(part.shape[0], vocab) if out is None else out
        for number, each in enumerate(parts):
            logits[:, number * width : (number + 1) * width] = each[:, : max(0, vocab - number * width)]
        return logits


def ranks_of(model: Llama) -> Ranks | None:
    """Return the processes among which the model is sharded, or None if it is not sharded."""
    return model.ranks if isinstance(model, ShardedLlama) else None
