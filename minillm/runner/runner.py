"""Execute schedules: a step becomes plain data (`StepWork`), then tensors, logits, and drawn tokens.

This runner builds all inputs of a step from scratch, which costs nothing on a CPU. On a GPU,
`minillm.runner.device.runner` replaces it and keeps the state of decoding sequences on the device.
"""

from functools import partial

import torch
from torch import Tensor

from minillm.model.kv_cache import new_kv_cache
from minillm.model.llama import Batch, Llama
from minillm.runner.drawn import Drawn
from minillm.runner.host_pool import HostPool
from minillm.runner.observers import StepObserver
from minillm.runner.sampler import sample_tokens
from minillm.runner.scores import ScoringForward, add_targets
from minillm.runner.step import ChunkWork, StepWork, packed
from minillm.runner.to_device import to_device
from minillm.sequence import Chunk, Schedule, Sequence


class Runner:
    """The model and its pool of blocks, which is allocated once."""

    def __init__(self, model: Llama, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.model, self.block_size = model, block_size
        self.kv_cache = new_kv_cache(model, num_blocks, block_size)
        self.forward = ScoringForward(model, partial(model.hidden, kv_cache=self.kv_cache))
        self.host_pool = HostPool(self.kv_cache, num_host_blocks)
        self.observers: list[StepObserver] = []

    def run(self, schedule: Schedule, copies: list[tuple[int, int]]) -> tuple[Tensor, list[Chunk]]:
        """Move and copy blocks, then compute the step.

        Args:
            copies: (source, destination) blocks of copies on write.

        Returns:
            Logits ``[n, vocab]``, valid until the next step, and the chunks that have logits. A chunk's logits are
            ``chunk.num_logits`` rows that start at ``chunk.row``.
        """
        for observer in self.observers:
            observer.prepare(schedule, copies)
        sampled, row = [], 0
        for chunk in schedule.chunks:
            if count := chunk.num_logits:
                chunk.row, row = row, row + count
                sampled.append(chunk)
        return self.observed(self.work_for(schedule, copies)), sampled

    def move(self, schedule: Schedule) -> None:
        """Carry out the block moves of a schedule that computes no tokens."""
        if schedule.moves.out or schedule.moves.back:
            for observer in self.observers:
                observer.prepare(schedule, [])
            self.observed(StepWork(schedule.moves, [], None, [], 0))

    def observed(self, work: StepWork) -> Tensor:
        """Run `compute`, and notify every observer before and after. Return the logits."""
        for observer in self.observers:
            observer.begin(work)
        logits = self.compute(work)
        for observer in self.observers:
            observer.end()
        return logits

    def work_for(self, schedule: Schedule, copies: list[tuple[int, int]]) -> StepWork:
        """Return the work of a scheduled step as plain data, without sequences and requests."""
        chunks = [self.chunk_work(chunk) for chunk in schedule.chunks]
        return StepWork(schedule.moves, copies, None, chunks, len(schedule.decodes))

    @torch.inference_mode()
    def compute(self, work: StepWork) -> Tensor:
        """Compute a step. Return logits ``[n, vocab]`` float32: the rows of all chunks, in the order of the chunks."""
        self.prepare(work)
        if not work.chunks:
            return torch.empty(0, 0, dtype=self.model.dtype, device=self.model.device)
        return self.forward(self.batch(work.chunks, work.num_decodes), work.chunks, 0).float()

    def prepare(self, work: StepWork) -> None:
        """Move and copy the step's blocks."""
        self.host_pool.carry_out(work.moves, work.copies)

    def draw(self, logits: Tensor, draws: list[Chunk]) -> Drawn:
        """Draw a token for each of ``draws`` from the step's ``logits``."""
        return sample_tokens(self.as_drawn_from(logits), draws)

    def as_drawn_from(self, logits: Tensor) -> Tensor:
        """Return the logits to draw tokens from: as float32 in deterministic mode, unchanged otherwise.

        Kernels add up a row in an order that depends on the dtype. Penalties need float32. So in deterministic mode
        every draw uses float32, with and without penalties.
        """
        return logits.float() if self.model.is_deterministic else logits

    def prepare_ahead(self) -> bool:
        """Prepare later steps for at most 0.1 s, while no sequence runs. Return False if nothing is left to prepare."""
        return any(observer.prepare_ahead() for observer in self.observers)

    @property
    def prepared(self) -> tuple[int, int]:
        """Return how many shapes of steps `prepare_ahead` has prepared, and how many there are; (0, 0) if unknown."""
        return 0, 0

    def forget(self) -> None:
        """Discard everything derived from the device's state of sequences, because a step has failed."""
        for observer in self.observers:
            observer.forget()

    def give_up(self, sequences: list[Sequence]) -> None:
        """Discard the device's state of sequences that another step has advanced. (This runner keeps no such state.)"""

    def close(self) -> None:
        """Free resources that would outlive the runner."""
        for observer in self.observers:
            observer.close()

    def chunk_work(self, chunk: Chunk) -> ChunkWork:
        """Return a chunk's tokens, block ids and targets as plain data, without its sequence and request."""
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        token_ids = chunk.token_ids
        blocks = sequence.blocks[: -(-(first + len(token_ids)) // self.block_size)]
        work = ChunkWork(token_ids, first, blocks, sequence.num_prompt_tokens, chunk.num_logits)
        if chunk.group.scores is not None:
            add_targets(work, chunk)
        return work

    def batch(self, chunks: list[ChunkWork], num_decodes: int) -> Batch:
        """Return the chunks as the model's input. The first ``num_decodes`` chunks are decodes (one token each)."""
        numbers = packed(chunks, num_decodes, self.block_size)
        device, rope_lengths = self.model.device, None
        if self.model.rotary.dynamic:  # for prompt tokens the prompt's length, for generated ones the length so far
            rope_lengths = [max(each.num_prompt_tokens, i + 1) for each in chunks for i in range(each.first, each.end)]

        return Batch(
            token_ids=to_device(numbers.token_ids, torch.int64, device),
            positions=to_device(numbers.positions, torch.int64, device),
            slot_mapping=to_device(numbers.slots, torch.int64, device),
            block_tables=to_device(numbers.tables, torch.int32, device),
            context_lens=to_device(numbers.lengths, torch.int32, device),
            num_decodes=num_decodes,
            cu_seqlens=to_device(numbers.starts, torch.int32, device),
            logit_rows=to_device(numbers.logit_rows, torch.int64, device),
            rope_lengths=rope_lengths,
        )
