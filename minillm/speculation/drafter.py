"""A draft model proposes the next tokens of sequences: a smaller model with the same tokenizer, or a quantized copy.

It has its own weights, and its own pool of K and V with the target model's block ids. So the target's forks, cached
prefixes, copies on write and swaps apply to both pools, and no state per sequence is needed (`speculation.drafted`).
Before the draft model proposes tokens, it computes its unseen tokens: those of a prompt, or the last tokens of an
answer. Each draft token is drawn as the target model will draw it, from the request's parameters, the seed and the
position. The random noise is the same, so models with similar logits agree at any temperature.

An error in this bookkeeping would cost accepted draft tokens, but never change an output.
"""

import time
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from minillm.model.kv_cache import new_kv_cache
from minillm.model.llama import Batch, Llama
from minillm.params import SamplingParams
from minillm.runner.drawn import Drawn
from minillm.runner.observers import StepObserver
from minillm.runner.runner import Runner
from minillm.runner.step import StepWork
from minillm.sequence import Chunk, Schedule, Sequence, SequenceGroup
from minillm.speculation.drafted import Drafted
from minillm.speculation.drafts import DraftChunk

MOST_SEQS = 4  # speculate for at most this many running sequences; beyond, a draft token costs as much as a sequence
_RUNS = 8  # timed runs of one token
_FEW = 8  # up to this many unseen tokens are computed like draft tokens, more like a prompt


@dataclass(slots=True)
class _Draft:
    """A sequence while the draft model continues it: ``group`` and ``sequence`` are the draft model's copies."""

    chunk: DraftChunk  # of the target model
    group: SequenceGroup
    sequence: Sequence

    @property
    def num_drafted(self) -> int:
        return self.sequence.num_tokens - self.chunk.sequence.num_tokens

    @property
    def goes_on(self) -> bool:
        """Return whether drafting has begun and should continue. Drafting stops when the CPU has seen an end token.

        The CPU may see that token late, so a few more tokens may have been drafted.
        """
        known = self.sequence.token_ids[-1] not in self.group.end_ids
        return 0 < self.num_drafted < self.chunk.optional and known


class Drafter(StepObserver):
    """A draft model. It observes the steps of the target model's runner and proposes draft tokens for them.

    Args:
        runner: the draft model's runner. Its pool has as many blocks as the target model's pool, on the device and in
            host memory.
        num_blocks, num_host_blocks: the number of blocks on the device, and in host memory.
        other: the target model.
        most_tokens: maximum number of tokens that the draft model computes in a step before it drafts.
    """

    def __init__(self, runner: Runner, num_blocks: int, num_host_blocks: int, other: Llama, most_tokens: int) -> None:
        self.runner, self._most_tokens = runner, most_tokens
        self.draft_cost, self._vocab_size = draft_cost(runner.model, other), other.config.vocab_size
        self._drafted = Drafted(num_blocks, runner.block_size, num_host_blocks)
        self._groups: dict[
            SequenceGroup, SequenceGroup
        ] = {}  # of the last draft tokens, with the parameters of their draws

    def prepare(self, schedule: Schedule, copies: list[tuple[int, int]]) -> None:
        moves = schedule.moves
        if moves.out or moves.back or copies:
            self._drafted.move(moves, copies)
            self.runner.compute(StepWork(moves, copies, None, [], 0))
        for chunk in schedule.chunks:
            first = chunk.sequence.num_computed
            self._drafted.overwrite(chunk.sequence.blocks, first, first + chunk.count + chunk.optional)
        wanted = [chunk for chunk in schedule.extended if isinstance(chunk, DraftChunk) and not chunk.proposed]
        if wanted:
            self._propose(wanted)

    def replace(self, blocks: SequenceOf[int]) -> None:
        self._drafted.overwrite(blocks, 0, len(blocks) * self.runner.block_size)

    def prepare_ahead(self) -> bool:
        return self.runner.prepare_ahead()

    def forget(self) -> None:
        self._drafted.forget()
        self.runner.forget()

    def close(self) -> None:
        self.runner.close()

    def _propose(self, chunks: list[DraftChunk]) -> None:
        """Propose draft tokens for ``chunks``.

        The draft model must first compute the tokens of a sequence that it has not computed yet. If they are too many
        for one step, the sequence gets no draft tokens.
        """
        groups = dict.fromkeys(chunk.group for chunk in chunks)
        self._groups = {group: self._groups.get(group) or _drawn_for(group) for group in groups}
        drafts = [_Draft(chunk, self._groups[chunk.group], self._sequence(chunk.sequence)) for chunk in chunks]
        firsts = [draft.sequence.num_computed for draft in drafts]
        under_way = self._compute(self._unseen(drafts))
        while going := [draft for draft in drafts if draft.goes_on]:
            under_way += self._compute(Schedule([Chunk(draft.group, draft.sequence, 1, True) for draft in going]))
        for sampled, drawn in under_way:
            for chunk, token_id in zip(sampled, drawn.wait()[0], strict=True):
                chunk.sequence.token_ids.append(token_id)
        for draft, first in zip(drafts, firsts, strict=True):
            sequence = draft.sequence
            drafted = sequence.token_ids[draft.chunk.sequence.num_tokens :]
            draft.chunk.proposed = tuple(takewhile(lambda token_id: token_id < self._vocab_size, drafted))
            self._drafted.note(sequence.blocks, first, sequence.num_computed)
        self.runner.give_up([draft.sequence for draft in drafts])

    def _sequence(self, sequence: Sequence) -> Sequence:
        """Return a copy of a sequence for the draft model, with the number of tokens that this model has computed."""
        ids, vocab_size = list(sequence.token_ids), self.runner.model.config.vocab_size
        if vocab_size < self._vocab_size:  # ids outside the draft model's vocabulary are replaced
            ids = [token_id if token_id < vocab_size else 0 for token_id in ids]
        drafted = Sequence(sequence.seq_id, ids, sequence.num_prompt_tokens, sequence.index, sequence.seed)
        drafted.table = sequence.table
        drafted.num_computed = min(self._drafted.length(sequence.blocks), len(ids) - 1)
        return drafted

    def _unseen(self, drafts: list[_Draft]) -> Schedule:
        """Return a schedule of the tokens that the draft model has not computed yet, at most ``most_tokens``.

        If the schedule computes all such tokens of a sequence, its logits give the sequence's first draft token.
        """
        schedule, left = Schedule(), self._most_tokens
        for draft in drafts:
            missing = draft.sequence.num_tokens - draft.sequence.num_computed
            chunk = Chunk(draft.group, draft.sequence, min(missing, left), missing == 1)
            left -= chunk.count
            if chunk.count:
                several = schedule.extended if missing <= _FEW else schedule.prefills
                (schedule.decodes if missing == 1 else several).append(chunk)
        return schedule

    def _compute(self, schedule: Schedule) -> list[tuple[list[Chunk], Drawn]]:
        """Compute the scheduled tokens, and draw the tokens that follow.

        If a next step may run ahead of the CPU, do not wait for the drawn tokens: return the chunks and their draws.
        Otherwise, append the drawn tokens to the sequences, and return an empty list.
        """
        if not schedule.chunks:
            return []
        logits, sampled = self.runner.run(schedule, [])
        for chunk in schedule.chunks:
            chunk.sequence.num_computed += chunk.count
        if not sampled:
            return []
        drawn = self.runner.draw(logits, sampled)
        if drawn.may_run_ahead:
            for chunk in sampled:
                chunk.sequence.num_pending += 1
            return [(sampled, drawn)]
        for chunk, token_id in zip(sampled, drawn.wait()[0], strict=True):
            chunk.sequence.token_ids.append(token_id)
        return []


def drafter_of(runner: Runner) -> Drafter | None:
    """Return a runner's draft model, or None."""
    return next((each for each in runner.observers if isinstance(each, Drafter)), None)


def draft_cost(draft: Llama, model: Llama) -> float:
    """Return the draft model's time per token, as a fraction of the target model's time per token.

    On a CPU, the fraction is measured. On a GPU, it is estimated from the bytes per token and the number of layers,
    because a measurement would vary between starts. The number of draft tokens would then vary as well, and with it the
    rounding of matmuls and the outputs.
    """
    if model.device.type == "cpu":
        return _seconds_of_a_token(draft) / _seconds_of_a_token(model)
    return token_bytes(draft) / token_bytes(model)


def token_bytes(model: Llama) -> int:
    """Estimate the time of a token on a GPU. Return it as the number of bytes that the GPU could read in this time."""
    layer = 33 << 20  # bytes read in 13 us, the overhead of a layer
    return model.weight_bytes + layer * model.config.num_layers


@torch.inference_mode()
def _seconds_of_a_token(model: Llama) -> float:
    """Time several forward passes of one token on the CPU. Return the shortest time, in seconds."""
    zeros = torch.zeros(1, dtype=torch.int64)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    lengths = [1] if model.rotary.dynamic else None
    batch = Batch(zeros, zeros, zeros, table, length, 1, length[:0], rope_lengths=lengths)
    cache, times = new_kv_cache(model, 1, 16).zero_(), []
    for _ in range(_RUNS):
        began = time.perf_counter()
        model.forward(batch, cache)
        times.append(time.perf_counter() - began)
    return min(times)


def _drawn_for(group: SequenceGroup) -> SequenceGroup:
    """Return a copy of a group for the draft model. The copy does not request log-probabilities."""
    same = copy(group)
    assert isinstance(group.params, SamplingParams)
    same.params = replace(group.params, logprobs=None, prompt_logprobs=None)
    same.scores, same.error = None, None
    return same
