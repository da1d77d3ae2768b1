"""Copy blocks of a sharded model between the KV caches of all ranks and buffers in rank 0's memory.

Each rank has the K and V of its own KV heads. Rank 0 alone reads and writes files: a block's bytes are the parts of all
ranks, in the order of the ranks. So a block is complete on every rank or on none, and one checksum covers all parts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from minillm.model.shard import ShardedLlama, shard_of
from minillm.runner import wire
from minillm.runner.pool_blocks import Buffers, Incoming, PoolBlocks
from minillm.runner.runner import Runner
from minillm.runner.to_host import ToHost
from minillm.runner.wire import BlockMove


class ShardedBlocks(PoolBlocks):
    """The blocks of all ranks. Rank 0 moves blocks, and every other rank repeats its moves with `follow`.

    All ranks must move blocks in the same order relative to their steps, since they exchange parts in collectives.

    Args:
        runner: this rank's runner, of a `ShardedLlama`.
        send: on rank 0, sends a message to every other rank.
    """

    def __init__(self, runner: Runner, send: Callable[[bytes], object] = lambda message: None) -> None:
        tensors, model = runner.kv_cache.tensors, runner.model
        assert isinstance(model, ShardedLlama)
        super().__init__(tensors, runner.block_size)
        self._ranks, self._send = model.ranks, send
        shards = [shard_of(model.config, rank, self._ranks.size) for rank in range(self._ranks.size)]
        heads = [shard.local(model.config).num_kv_heads for shard in shards]
        per_head = [tensor[:, :, 0].nbytes // model.local.num_kv_heads for tensor in tensors]
        self._sizes = [[each * count for each in per_head] for count in heads]  # bytes of each rank's part, by tensor
        self._totals = [sum(sizes) for sizes in self._sizes]
        self.num_bytes = sum(self._totals)

    def snapshot(self, blocks: Sequence[int], valid: int | None = None) -> Callable[[], list[Buffers] | None]:
        self._send(wire.encode_blocks(BlockMove(list(blocks), writes=False)))
        gathered = ToHost([self._all_parts(blocks)])

        def fetch() -> list[Buffers] | None:
            [host] = gathered.tensors()
            copies = []
            for number in range(len(blocks)):
                parts = [host[rank, number, :total].split(self._sizes[rank]) for rank, total in enumerate(self._totals)]
                planes = [piece.numpy().reshape(len(self._tensors[0]) * 2, -1) for part in parts for piece in part]
                copies.append(planes)
            return self._checked(copies, valid)

        return fetch

    def incoming(self, blocks: list[int]) -> Incoming:
        """Return host memory to read all ranks' parts of ``blocks`` into."""
        host = torch.empty(self._shape(blocks), dtype=torch.uint8, pin_memory=self._tensors[0].is_cuda)
        array, numbers = host.numpy(), range(len(blocks))
        buffers = [[array[rank, number, :n].data for rank, n in enumerate(self._totals)] for number in numbers]
        return Incoming(blocks, buffers, [host])

    def put(self, incoming: Incoming) -> None:
        """Copy all ranks' parts of the blocks from ``incoming`` to their pools."""
        self._send(wire.encode_blocks(BlockMove(incoming.blocks, writes=True)))
        self._take_part(incoming.blocks, incoming.staging[0].to(self._tensors[0].device, non_blocking=True))

    def follow(self, move: BlockMove) -> None:
        """Do this rank's part of a move that rank 0 has begun."""
        if move.writes:
            parts = torch.empty(self._shape(move.blocks), dtype=torch.uint8, device=self._tensors[0].device)
            self._take_part(move.blocks, parts)
        else:
            self._all_parts(move.blocks)

    def _shape(self, blocks: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape of all ranks' parts of blocks, in bytes: ``[ranks, blocks, longest part]``."""
        return len(self._totals), len(blocks), max(self._totals)

    def _all_parts(self, blocks: Sequence[int]) -> Tensor:
        """Return the parts of ``blocks``, gathered from all ranks: uint8, see `_shape`."""
        part = torch.cat([copy.view(torch.uint8).flatten(1) for copy in self._gathered(blocks)], dim=1)
        return self._ranks.all_gather(pad(part, (0, max(self._totals) - part.shape[1])))

    def _take_part(self, blocks: Sequence[int], parts: Tensor) -> None:
        """Send rank 0's ``parts`` to all ranks, see `_shape`. Write this rank's part to its pool."""
        rank = self._ranks.rank
        own = self._ranks.broadcast(parts)[rank, :, : self._totals[rank]].split(self._sizes[rank], dim=1)
        shapes = [(len(blocks), *tensor.shape[:2], *tensor.shape[3:]) for tensor in self._tensors]
        triples = zip(own, self._tensors, shapes, strict=True)
        self._scatter(blocks, [part.contiguous().view(tensor.dtype).view(shape) for part, tensor, shape in triples])
