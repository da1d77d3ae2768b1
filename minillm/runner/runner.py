"""From a schedule to logits to drawn tokens: builds the step's tensors and runs the model over the pool.

With `DecodeSteps` (on a GPU) the decoding sequences' state is on the device already, and a step without prompts is the
replay of a graph. Without (on a CPU, where a launch costs nothing) the host sends all of it.

A step is first written down (`StepWork`), then computed. Where several ranks share the model, that is the seam: rank 0
alone has requests, scheduler, block manager and sampling; it sends each step's work to the others, and every rank
computes it on its own part of the model and of the pool, under the same block ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from minillm import kernels
from minillm.engine.scheduler import Schedule, ScheduledChunk
from minillm.model.batch import Batch
from minillm.model.llama import Llama
from minillm.model.sharded import ranks_of
from minillm.parallel.channel import Leader
from minillm.runner.penalties import needs_host
from minillm.runner.rows import DecodeSteps
from minillm.runner.sampler import Drawn, SampleRow, sample_tokens
from minillm.runner.step import ChunkWork, Pairs, StepWork
from minillm.runs import contiguous_runs

_STAGED_BLOCKS = 256  # moved between host and device at a time: the room that it takes on the device


class Runner:
    """The model and its pool of blocks, allocated once.

    ``decoder`` computes decode steps whose tokens the host need not see before the next step is launched. ``leader`` is
    the line to the other ranks of the model, where there are any.
    """

    def __init__(
        self, model: Llama, num_blocks: int, block_size: int, num_host_blocks: int = 0, leader: Leader | None = None
    ) -> None:
        self.model = model
        self.leader = leader
        self.block_size = block_size
        self.kv_cache = model.new_kv_cache(num_blocks, block_size)
        self.decoder: DecodeSteps | None = None
        self._endings: list[Callable[[], object]] = []
        ranks = ranks_of(model)
        if leader is not None and ranks is not None:
            self._endings += [leader.close, ranks.close]
        self._end = weakref.finalize(self, _call_all, self._endings)  # at the latest when the interpreter ends
        self._num_host_blocks = num_host_blocks
        self._host_pool: Tensor | None = None  # [num_host_blocks, layers, 2, block_size, kv heads, head_dim]

    def decode_on_device(
        self, max_num_seqs: int, max_model_len: int, *, graphs: bool, sharing: kernels.Costs | None
    ) -> None:
        """Keep the state of decoding sequences on the device: see `DecodeSteps`."""
        self.decoder = DecodeSteps(
            self.model, self.kv_cache, self.block_size, max_num_seqs, max_model_len, graphs=graphs, sharing=sharing
        )
        self._endings.insert(1, self.decoder.drop_graphs)  # they hold the ranks' collectives

    @torch.inference_mode()
    def run(self, schedule: Schedule, copies: list[tuple[int, int]]) -> tuple[Tensor, list[ScheduledChunk]]:
        """Move blocks to and from the host, copy those that the step writes to and others share, compute the step.

        Returns:
            Logits ``[n, vocab]``, valid until the next step, and the n chunks that they belong to: those that computed
            a sequence's last token.
        """
        if self.decoder is None:
            sampled = [chunk for chunk in schedule.chunks if reaches_the_end(chunk)]
            decode, chunks, num_decodes = None, schedule.chunks, len(schedule.decodes)
        else:
            sampled = schedule.decodes + [chunk for chunk in schedule.prefills if reaches_the_end(chunk)]
            joins = bool(schedule.prefills)
            decode = self.decoder.work_for(schedule.decodes, joins=joins) if schedule.decodes else None
            chunks, num_decodes = schedule.prefills, 0
        work = StepWork(
            schedule.swap_out, schedule.swap_in, copies, decode, [self._chunk(each) for each in chunks], num_decodes
        )
        if self.leader is not None:
            self.leader.send(work.encode())
        return self.compute(work), sampled

    @torch.inference_mode()
    def move(self, schedule: Schedule) -> None:
        """Of a schedule that computes nothing: move blocks to and from the host."""
        if schedule.swap_out or schedule.swap_in:
            work = StepWork(schedule.swap_out, schedule.swap_in, [], None, [], 0)
            if self.leader is not None:
                self.leader.send(work.encode())
            self.compute(work)

    @torch.inference_mode()
    def compute(self, work: StepWork) -> Tensor:
        """Do on this rank's device what a step asks for; returns the logits ``[n, vocab]``, which only rank 0 has."""
        self.move_to_host(work.swap_out)
        self.move_from_host(work.swap_in)
        if work.copies:
            kernels.block_copy(self.kv_cache, torch.tensor(work.copies, device=self.model.device))
        if work.decode is None and not work.chunks:
            return self.kv_cache.new_empty(0, 0)  # blocks were moved, that was all
        if self.decoder is None:
            return self.model.forward(self._batch(work.chunks, work.num_decodes), self.kv_cache).float()
        num_logits = sum(chunk.wants_logits for chunk in work.chunks) + (work.decode.num_seqs if work.decode else 0)
        logits = self.decoder.logits[:num_logits]
        if not work.chunks:
            assert work.decode is not None, "a step without any token"
            self.decoder.forward(work.decode)
        else:
            batch = self._batch(work.chunks, 0)
            if work.decode is not None:
                batch = self.decoder.join(work.decode, batch)
            self.model.forward(batch, self.kv_cache, out=logits)
        return logits

    def watched(self) -> AbstractContextManager[None]:
        """Around a step: where another rank dies, the block ends with an error within seconds."""
        return nullcontext() if self.leader is None else self.leader.watched()

    def close(self) -> None:
        """Let the other ranks go, where there are any; nothing can be computed after that."""
        self._end()

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: list[SampleRow], num_decodes: int, keeps_tokens: bool) -> Drawn:
        """Draw a token for each of ``rows`` from the step's ``logits``.

        Args:
            num_decodes: how many sequences have decoded in this step; theirs are the first rows of logits.
            keeps_tokens: what the method of that name says of ``rows``.
        """
        if self.decoder is None:
            return Drawn(rows, *sample_tokens(logits, rows))
        if len(logits) > num_decodes or not keeps_tokens:
            return Drawn(rows, *self.decoder.draw_from(logits, rows))
        return Drawn(rows, *self.decoder.draw(rows))

    def keeps_tokens(self, rows: list[SampleRow]) -> bool:
        """Whether the step after these draws can be launched before the host has seen their tokens."""
        return self.decoder is not None and not any(needs_host(row.params, row.sequence) for row in rows)

    def forget(self) -> None:
        """After a failure: what the device holds of sequences is not to be relied on."""
        if self.decoder is not None:
            self.decoder.forget()

    def move_to_host(self, pairs: Pairs) -> None:
        """Save (block, host block) pairs.

        All moves are queued on one stream, between pinned memory and the device: each sees what those before it wrote,
        and nobody waits.
        """
        if pairs and self._host_pool is None:
            shape = (self._num_host_blocks, *self.kv_cache.shape[:2], *self.kv_cache.shape[3:])
            self._host_pool = torch.empty(shape, dtype=self.kv_cache.dtype, pin_memory=self.kv_cache.is_cuda)
        for start in range(0, len(pairs), _STAGED_BLOCKS):
            blocks, hosts = zip(*pairs[start : start + _STAGED_BLOCKS], strict=True)
            assert self._host_pool is not None
            staging = self._host_pool.new_empty((len(blocks), *self._host_pool.shape[1:]), device=self.model.device)
            kernels.gather_blocks(self.kv_cache, torch.tensor(blocks, device=self.model.device), staging)
            for first, host, count in contiguous_runs(hosts):
                self._host_pool[host : host + count].copy_(staging[first : first + count], non_blocking=True)

    def move_from_host(self, pairs: Pairs) -> None:
        """Bring (host block, block) pairs back."""
        for start in range(0, len(pairs), _STAGED_BLOCKS):
            hosts, blocks = zip(*pairs[start : start + _STAGED_BLOCKS], strict=True)
            assert self._host_pool is not None
            staging = self._host_pool.new_empty((len(blocks), *self._host_pool.shape[1:]), device=self.model.device)
            for first, host, count in contiguous_runs(hosts):
                staging[first : first + count].copy_(self._host_pool[host : host + count], non_blocking=True)
            kernels.scatter_blocks(self.kv_cache, torch.tensor(blocks, device=self.model.device), staging)

    def _chunk(self, chunk: ScheduledChunk) -> ChunkWork:
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        end = first + chunk.count
        assert sequence.table is not None
        return ChunkWork(
            token_ids=sequence.token_ids[first:end],
            first=first,
            blocks=sequence.table.blocks[: -(-end // self.block_size)],
            num_prompt_tokens=sequence.num_prompt_tokens,
            wants_logits=reaches_the_end(chunk),
        )

    def _batch(self, chunks: list[ChunkWork], num_decodes: int) -> Batch:
        """The chunks' tensors; the first ``num_decodes`` chunks decode."""
        size = self.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []  # of each context, this step's tokens included
        starts = [0]
        logit_rows: list[int] = []
        for number, chunk in enumerate(chunks):
            first, blocks = chunk.first, chunk.blocks
            end = first + len(chunk.token_ids)
            token_ids += chunk.token_ids
            positions += range(first, end)
            slots += [blocks[i // size] * size + i % size for i in range(first, end)]
            lengths.append(end)
            if number >= num_decodes:
                starts.append(starts[-1] + end - first)
            if chunk.wants_logits:
                logit_rows.append(len(token_ids) - 1)
        width = max(-(-length // size) for length in lengths)
        tables = [chunk.blocks + [0] * (width - len(chunk.blocks)) for chunk in chunks]
        device = self.model.device

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return Batch(
            token_ids=tensor(token_ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slot_mapping=tensor(slots, torch.int64),
            block_tables=tensor(tables, torch.int32),
            context_lens=tensor(lengths, torch.int32),
            num_decodes=num_decodes,
            cu_seqlens=tensor(starts, torch.int32),
            logit_rows=tensor(logit_rows, torch.int64),
            rope_lengths=_rope_lengths(chunks) if self.model.rotary.dynamic else None,
        )


def _call_all(endings: list[Callable[[], object]]) -> None:
    for end in endings:
        end()


def reaches_the_end(chunk: ScheduledChunk) -> bool:
    """Whether the chunk computes its sequence's last token, whose logits are wanted."""
    return chunk.sequence.num_computed + chunk.count == chunk.sequence.num_tokens


def _rope_lengths(chunks: list[ChunkWork]) -> list[int]:
    """For dynamic rope scaling: a prompt token goes by the prompt's length, a generated one by its own position."""
    return [
        max(chunk.num_prompt_tokens, position + 1)
        for chunk in chunks
        for position in range(chunk.first, chunk.first + len(chunk.token_ids))
    ]
