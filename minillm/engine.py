"""The engine: requests in, tokens out, one step at a time.

    schedule -> run -> sample -> update

One thread drives it. `Engine.abort` alone may be called from any thread; it takes effect at the next step.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.cache import BlockManager, CacheStats
from minillm.decoding.params import SamplingParams
from minillm.decoding.sampler import SampleRow, sample_tokens
from minillm.decoding.stop import StopStringFilter
from minillm.errors import UsageError
from minillm.outputs import CompletionOutput, Delta, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from minillm.runner import Runner
from minillm.scheduler import Schedule, ScheduledChunk, Scheduler
from minillm.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from minillm.tokenizer import Tokenizer

_SEED_STEP = 0x9E3779B97F4A7C15  # keeps the seeds of a request's samples apart


@dataclass
class Engine:
    """A model, its pool of blocks and the requests that run on it.

    ``tokenizer`` is None for a model without text (dummy weights): requests are token ids then, and outputs too.
    """

    runner: Runner
    cache: BlockManager
    scheduler: Scheduler
    tokenizer: Tokenizer | None
    max_model_len: int
    eos_token_ids: frozenset[int]
    source: str = ""  # where the weights came from, for people
    seed: int = 0
    num_steps: int = 0
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)  # until `take_finished`
    _aborts: deque[str] = field(default_factory=deque)
    _errors: dict[str, str] = field(default_factory=dict)
    _next_seq_id: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # --- requests -----------------------------------------------------------------------------------------------------

    def check_prompt(self, prompt_token_ids: SequenceOf[int]) -> None:
        """Raise UsageError unless the prompt can be computed by this model."""
        vocab = self.runner.model.config.vocab_size
        if not prompt_token_ids:
            raise UsageError("the prompt is empty; give at least one token of text")
        for token_id in prompt_token_ids:
            # On a GPU an id out of range would destroy the whole context, not only this request.
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab:
                raise UsageError(f"token id {token_id!r} in the prompt is not from 0 to {vocab - 1}")
        if len(prompt_token_ids) >= self.max_model_len:
            raise UsageError(
                f"the prompt has {len(prompt_token_ids)} tokens and the context holds {self.max_model_len}, "
                "one of them for the answer; shorten the prompt or raise max_model_len"
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        parent: Sequence | None = None,
        hold: bool = False,
    ) -> SequenceGroup:
        """Queue a request.

        Args:
            parent: an idle sequence; the beginning that the prompt has in common with it is not computed again.
            hold: keep the first completion's blocks when it ends: the sequence becomes idle and can be a parent.

        Raises:
            UsageError: bad prompt, or ``request_id`` is running already.
            CapacityError: the request could never fit.
        """
        if request_id in self.groups:
            raise UsageError(f"request id {request_id!r} is in use; wait until it has finished or choose another")
        self.check_prompt(prompt_token_ids)
        vocab = self.runner.model.config.vocab_size
        for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids)):
            if any(token_id >= vocab for token_id in ids):
                raise UsageError(f"{name}: token id {max(ids)} is not below the vocabulary's size {vocab}")
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        first = self._new_sequence(list(prompt_token_ids), len(prompt_token_ids), seed, 0, params)
        group = SequenceGroup(
            request_id=request_id,
            params=params,
            max_tokens=min(params.max_tokens, self.max_model_len - len(prompt_token_ids)),
            sequences=[first],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            prompt=prompt,
            seed=seed,
            parent=parent,
            hold=hold,
            forked=params.n == 1,
        )
        self.scheduler.add(group)
        self.groups[request_id] = group
        return group

    def _new_sequence(
        self, token_ids: list[int], num_prompt_tokens: int, seed: int, index: int, params: SamplingParams
    ) -> Sequence:
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        mixed = (seed + index * _SEED_STEP) & ((1 << 64) - 1)
        prompt_ids = token_ids[:num_prompt_tokens]
        return Sequence(
            seq_id=seq_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            seed=mixed - (1 << 64) if mixed >> 63 else mixed,
            index=index,
            detokenizer=None if self.tokenizer is None else self.tokenizer.detokenizer(prompt_ids),
            stop_filter=StopStringFilter(params.stop),
        )

    def abort(self, request_id: str) -> None:
        """End a request at the next step, wherever it is; what it has generated so far is kept. Any thread may call."""
        self._aborts.append(request_id)

    def release(self, sequence: Sequence) -> None:
        """Free an idle sequence that `add_request` was told to hold."""
        self.scheduler.release_idle(sequence)

    def take_finished(self) -> list[RequestOutput]:
        """The requests that have finished since the last call, in the order in which they did."""
        finished = list(self.finished.values())
        self.finished.clear()
        return finished

    def cache_stats(self) -> CacheStats:
        return self.cache.stats()

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Compute one step; returns what it added to each completion.

        If the device fails, every request that was part of the step ends with the error, its blocks are freed, and the
        exception is raised: the engine itself stays usable.
        """
        deltas = self.carry_out_aborts()
        schedule = self.scheduler.schedule()
        if not schedule.chunks:
            assert not self.scheduler.has_work, "no progress: there is work, and nothing of it can run"
            return deltas
        now = time.monotonic()
        for chunk in schedule.chunks:
            if chunk.group.metrics.first_scheduled_time is None:
                chunk.group.metrics.first_scheduled_time = now
        try:
            logits, sampled = self.runner.run(schedule, self.cache.take_copies())
            draws = self._draws(schedule, sampled, logits.amax(-1).isnan().tolist() if sampled else [])
            tokens = sample_tokens(logits, [row for _, row in draws]) if draws else []
        except Exception as error:
            for group in {id(chunk.group): chunk.group for chunk in schedule.chunks}.values():
                self._fail(group, f"{type(error).__name__}: {error}")
            raise
        self.num_steps += 1
        deltas += [
            self._append_token(group, row.sequence, token) for (group, row), token in zip(draws, tokens, strict=True)
        ]
        for group in {id(chunk.group): chunk.group for chunk in sampled}.values():
            if group.request_id in self._errors:
                deltas += self._end(group, "abort")
            elif group.finished:
                self._retire(group)
        return deltas

    def _draws(
        self, schedule: Schedule, sampled: list[ScheduledChunk], broken: list[bool]
    ) -> list[tuple[SequenceGroup, SampleRow]]:
        """Note what was computed, fork groups whose prompt is complete, and list the tokens to draw."""
        first_draws: set[int] = set()
        for chunk in schedule.chunks:
            chunk.sequence.num_computed += chunk.count
            if not chunk.group.forked and chunk.sequence.num_computed == chunk.group.num_prompt_tokens:
                self._fork(chunk.group, chunk.sequence)
                first_draws.add(id(chunk.sequence))
        draws = []
        for number, (chunk, is_broken) in enumerate(zip(sampled, broken, strict=True)):
            group = chunk.group
            if is_broken:
                self._errors[group.request_id] = "the model produced NaN; another dtype may help: float32 or bfloat16"
                continue
            sequences = group.unfinished if id(chunk.sequence) in first_draws else [chunk.sequence]
            draws += [(group, SampleRow(group.params, s, number, self._end_ids(group.params))) for s in sequences]
        return draws

    def _fork(self, group: SequenceGroup, leader: Sequence) -> None:
        """Share the computed prompt with the group's other sequences; the first time, make them."""
        assert leader.table is not None
        prompt = leader.token_ids[: leader.num_prompt_tokens]
        for index in range(len(group.sequences), group.params.n):
            group.sequences.append(self._new_sequence(list(prompt), len(prompt), group.seed, index, group.params))
        for sequence in group.unfinished:
            if sequence is not leader:
                sequence.table = self.cache.fork(leader.table, sequence.seq_id, len(prompt))
                sequence.num_computed = len(prompt)
        group.forked = True

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))

    def _append_token(self, group: SequenceGroup, sequence: Sequence, token: TokenLogprobs) -> Delta:
        """Add a drawn token to its sequence and end the sequence where the token says so."""
        params = group.params
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.monotonic()
        sequence.token_ids.append(token.token_id)
        if params.logprobs is not None:
            sequence.logprobs.append(token)
            sequence.cumulative_logprob += token.logprob
        reason: FinishReason | None = None
        text = ""
        if token.token_id in params.stop_token_ids:
            reason, sequence.stop_reason = "stop", token.token_id
        elif token.token_id in self.eos_token_ids and not params.ignore_eos:
            reason = "stop"
        else:
            if sequence.detokenizer is not None:
                text = sequence.detokenizer.push(token.token_id)
            if sequence.num_output_tokens > params.min_tokens:
                text = sequence.stop_filter.push(text)
            if sequence.stop_filter.matched is None and sequence.num_output_tokens >= group.max_tokens:
                reason = "length"
        if reason is not None and sequence.detokenizer is not None:
            text += sequence.stop_filter.push(sequence.detokenizer.finish()) + sequence.stop_filter.finish()
        if sequence.stop_filter.matched is not None:
            reason, sequence.stop_reason = "stop", sequence.stop_filter.matched
        sequence.text.append(text)
        if reason is not None:
            self._end_sequence(group, sequence, reason)
        return Delta(group.request_id, sequence.index, text, [token.token_id], reason, sequence.stop_reason)

    # --- endings ------------------------------------------------------------------------------------------------------

    def _end_sequence(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if group.hold and sequence.index == 0 and sequence.table is not None:
            self.scheduler.keep_idle(sequence)
        else:
            self.scheduler.finish(sequence)

    def _end(self, group: SequenceGroup, reason: FinishReason) -> list[Delta]:
        """End all of a group's unfinished sequences now."""
        deltas = []
        for sequence in group.unfinished:
            text = sequence.stop_filter.finish()
            sequence.text.append(text)
            self._end_sequence(group, sequence, reason)
            deltas.append(Delta(group.request_id, sequence.index, text, [], reason))
        self._retire(group)
        return deltas

    def _retire(self, group: SequenceGroup) -> None:
        """Free what the group still holds and record its output."""
        group.metrics.finished_time = time.monotonic()
        self.scheduler.remove(group)
        del self.groups[group.request_id]
        self.finished[group.request_id] = self.output_of(group, self._errors.pop(group.request_id, None))

    def _fail(self, group: SequenceGroup, error: str) -> None:
        self._errors[group.request_id] = error
        self._end(group, "abort")

    def carry_out_aborts(self) -> list[Delta]:
        """End the requests that `abort` named, without computing anything."""
        deltas = []
        while self._aborts:
            group = self.groups.get(self._aborts.popleft())
            if group is not None:
                deltas += self._end(group, "abort")
        return deltas

    def output_of(self, group: SequenceGroup, error: str | None = None) -> RequestOutput:
        """What a group has generated so far."""
        wants_logprobs = group.params.logprobs is not None
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.sequences[0].token_ids[: group.num_prompt_tokens],
            outputs=[
                CompletionOutput(
                    index=sequence.index,
                    text="".join(sequence.text),
                    token_ids=sequence.output_token_ids,
                    cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
                    logprobs=sequence.logprobs if wants_logprobs else None,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                )
                for sequence in group.sequences
            ],
            finished=group.finished,
            num_cached_tokens=group.num_cached_tokens,
            metrics=group.metrics,
            error=error,
        )
