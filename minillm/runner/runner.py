"""From a schedule to logits to drawn tokens: a step is first written down as plain data (`StepWork`), then computed.

A draft model (`Guesser`) makes its guesses in front of that. This runner sends everything to the device at every step,
which costs nothing on a CPU. On a GPU, `minillm.runner.device_runner` keeps the state of decoding sequences there
instead.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from minillm import kernels
from minillm.model.llama import Batch, Llama
from minillm.runner.host_pool import HostPool
from minillm.runner.sampler import Drawn, sample_tokens
from minillm.runner.scores import Scored, score
from minillm.runner.step import ChunkWork, StepObserver, StepWork, packed
from minillm.sequence import Chunk, Schedule, Sequence


class Guesser(Protocol):
    """A draft model beside a runner's: see `minillm.speculation.drafter`."""

    price: float  # of a guess, in steps of the runner's own model

    def follow(self, schedule: Schedule, copies: list[tuple[int, int]]) -> None:
        """Do what the runner is about to do with its blocks, and guess where the schedule wants guesses."""

    def prepare_ahead(self) -> bool:
        """See `Runner.prepare_ahead`."""

    def forget(self) -> None:
        """Rely no more on anything that was computed: a step has failed."""

    def close(self) -> None:
        """Let go of everything that would outlive the runner."""


class Runner:
    """The model and its pool of blocks, allocated once."""

    def __init__(self, model: Llama, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.model, self.block_size = model, block_size
        self.kv_cache = model.new_kv_cache(num_blocks, block_size)
        self.host_pool = HostPool(self.kv_cache, num_host_blocks)
        self.observers: list[StepObserver] = []
        self.guesser: Guesser | None = None
        self._scored: Scored | None = None  # of the last step, until it is taken

    def run(self, schedule: Schedule, copies: list[tuple[int, int]]) -> tuple[Tensor, list[Chunk]]:
        """Move and copy blocks, then compute the step.

        Args:
            copies: (source, destination) blocks: copies on write.

        Returns:
            Logits ``[n, vocab]``, valid until the next step, and the chunks that they belong to, those that computed
            a sequence's last token: a row for each, and one for each guess behind it.
        """
        if self.guesser is not None:
            self.guesser.follow(schedule, copies)
        chunks = schedule.chunks
        sampled = [chunk for chunk in chunks if chunk.reaches_the_end]
        row = 0
        for chunk in sampled:
            chunk.row = row
            row += 1 + len(chunk.draft)
        return self.observed(self.work_for(schedule, copies)), sampled

    def move(self, schedule: Schedule) -> None:
        """Carry out only the block moves of a schedule without tokens."""
        if schedule.moves.out or schedule.moves.back:
            if self.guesser is not None:
                self.guesser.follow(schedule, [])
            self.observed(StepWork(schedule.moves, [], None, [], 0))

    def observed(self, work: StepWork) -> Tensor:
        """`compute`, with every observer told."""
        for observer in self.observers:
            observer.begin(work)
        logits = self.compute(work)
        for observer in self.observers:
            observer.end()
        return logits

    def work_for(self, schedule: Schedule, copies: list[tuple[int, int]]) -> StepWork:
        """Write a schedule down as plain data."""
        chunks = [self.chunk_work(chunk) for chunk in schedule.chunks]
        return StepWork(schedule.moves, copies, None, chunks, len(schedule.decodes))

    @torch.inference_mode()
    def compute(self, work: StepWork) -> Tensor:
        """Do a step's work; returns logits ``[n, vocab]`` float32 of the chunks that want them."""
        self.prepare(work)
        if not work.chunks:
            return torch.empty(0, 0, dtype=self.model.dtype, device=self.model.device)
        return self.logits(self.batch(work.chunks, work.num_decodes), work.chunks, 0).float()

    def logits(self, batch: Batch, chunks: list[ChunkWork], first: int, out: Tensor | None = None) -> Tensor:
        """Compute a batch; see `Llama.forward`. What its chunks want to know of their prompts is for `take_scores`.

        Args:
            first: the token of the batch that ``chunks`` begin with.
        """
        if not any(chunk.targets for chunk in chunks):
            return self.model.forward(batch, self.kv_cache, out)
        hidden = self.model.hidden(batch, self.kv_cache)
        self._scored = score(self.model, hidden, chunks, first)
        return self.model.logits(hidden, batch.logit_rows, out)

    def take_scores(self) -> Scored | None:
        """What the last step tells of prompts, once: of its chunks with targets, in their order."""
        scored, self._scored = self._scored, None
        return scored

    def prepare(self, work: StepWork) -> None:
        """Move and copy the step's blocks."""
        self.host_pool.save(work.moves.out)
        self.host_pool.restore(work.moves.back)
        if work.copies:
            copies = torch.tensor(work.copies, device=self.model.device)
            for tensor in self.kv_cache.tensors:
                kernels.block_copy(tensor, copies)

    def draw(self, logits: Tensor, draws: list[Chunk]) -> Drawn:
        """Draw a token for each of ``draws`` from the step's ``logits``."""
        return sample_tokens(self.as_drawn_from(logits), draws)

    def draw_guessed(self, logits: Tensor, draws: list[Chunk], holders: list[Sequence]) -> Drawn:
        """Draw for what sequences may become: each of ``draws`` has a sequence of its own, which may never be.

        Args:
            holders: the sequences that there are. Nothing that the device holds of them is their last token any more.
        """
        self.give_up(holders)
        return sample_tokens(self.as_drawn_from(logits), draws)

    def as_drawn_from(self, logits: Tensor) -> Tensor:
        """The logits in the type of all draws: in float32 where it must not depend on other requests' penalties.

        A kernel adds up numbers of another type in another order.
        """
        return logits.float() if self.model.is_deterministic else logits

    def prepare_ahead(self) -> bool:
        """Do a piece of what later steps would have to wait for, within 0.1 s; returns False where nothing is left.

        For the time in which nobody waits: between steps, while no sequence has work.
        """
        return self.guesser is not None and self.guesser.prepare_ahead()

    def prepare_while(self, nobody_waits: Callable[[], bool]) -> None:
        """`prepare_ahead`, piece by piece."""
        while nobody_waits() and self.prepare_ahead():
            pass

    def forget(self) -> None:
        """Rely no more on anything that the device holds of sequences: a step has failed."""
        if self.guesser is not None:
            self.guesser.forget()

    def give_up(self, sequences: list[Sequence]) -> None:
        """Rely no more on what the device holds of these sequences: they went on without it."""

    def close(self) -> None:
        """Let go of everything that would outlive the runner."""
        if self.guesser is not None:
            self.guesser.close()

    def chunk_work(self, chunk: Chunk) -> ChunkWork:
        """Write a chunk down as plain data."""
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        token_ids = [*sequence.token_ids[first : first + chunk.count], *chunk.draft]
        blocks = sequence.blocks[: -(-(first + len(token_ids)) // self.block_size)]
        num_logits = 1 + len(chunk.draft) if chunk.reaches_the_end else 0
        work = ChunkWork(token_ids, first, blocks, sequence.num_prompt_tokens, num_logits)
        if chunk.group.scores is not None and (rows := chunk.scored):
            work.score_from, work.num_top = rows.start, chunk.group.scores.num_top
            work.targets = sequence.token_ids[rows.start + 1 : rows.stop + 1]
        return work

    def batch(self, chunks: list[ChunkWork], num_decodes: int) -> Batch:
        """The chunks' tensors; the first ``num_decodes`` chunks decode."""
        numbers = packed(chunks, num_decodes, self.block_size)
        device, rope_lengths = self.model.device, None
        if self.model.rotary.dynamic:  # a prompt token goes by the prompt's length, a generated one by its own position
            rope_lengths = [max(each.num_prompt_tokens, i + 1) for each in chunks for i in range(each.first, each.end)]

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return Batch(
            token_ids=tensor(numbers.token_ids, torch.int64),
            positions=tensor(numbers.positions, torch.int64),
            slot_mapping=tensor(numbers.slots, torch.int64),
            block_tables=tensor(numbers.tables, torch.int32),
            context_lens=tensor(numbers.lengths, torch.int32),
            num_decodes=num_decodes,
            cu_seqlens=tensor(numbers.starts, torch.int32),
            logit_rows=tensor(numbers.logit_rows, torch.int64),
            rope_lengths=rope_lengths,
        )
