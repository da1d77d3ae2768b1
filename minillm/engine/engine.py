"""The engine: requests in, tokens out, one step at a time.

    schedule -> run -> draw -> (wait) -> update

Where the device keeps the drawn tokens itself, the next step is launched before the host waits for this one's: the
scheduler counts a token that is under way (`Sequence.num_pending`) like any other. A sequence that turns out to have
ended was then computed once too often; nobody looks at that token. Beams, and penalties that depend on the history,
wait.

One thread drives it. `Engine.abort` alone may be called from any thread; it takes effect at the next step.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from operator import countOf
from typing import TYPE_CHECKING

from minillm.beams.candidates import BeamStep, beam_candidates, token_logprobs
from minillm.beams.outputs import beam_outputs, best_beam, ending_of, finished_beam
from minillm.beams.search import BeamSearch, Candidate
from minillm.cache import BlockManager, CacheStats
from minillm.engine.scheduler import Schedule, ScheduledChunk, Scheduler
from minillm.errors import UsageError
from minillm.outputs import (
    CompletionOutput,
    Delta,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    StepReport,
    TokenLogprobs,
)
from minillm.params import BeamSearchParams, Params
from minillm.runner.runner import Runner
from minillm.runner.sampler import Drawn, SampleRow
from minillm.sequence import Sequence, SequenceGroup
from minillm.text.stop import StopStringFilter

if TYPE_CHECKING:
    from torch import Tensor

    from minillm.text.tokenizer import Tokenizer

_SEED_STEP = 0x9E3779B97F4A7C15  # keeps the seeds of a request's samples apart


@dataclass(slots=True)
class StepUnderWay:
    """A step that has been launched, and whose tokens the host has not seen yet."""

    schedule: Schedule
    logits: Tensor | None
    draws: list[tuple[SequenceGroup, SampleRow]]
    drawn: Drawn | None
    searching: list[tuple[SequenceGroup, dict[int, int]]]
    may_run_ahead: bool  # the next step depends on nothing that this one has to tell the host

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for what the step draws."""
        return any(not group.finished for group, _ in self.searching) or any(
            not row.sequence.finished for _, row in self.draws
        )


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
    last_step: StepReport | None = None  # the one whose tokens came last
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)  # until `take_finished`
    _aborts: deque[str] = field(default_factory=deque)
    _errors: dict[str, str] = field(default_factory=dict)
    _next_seq_id: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._under_way: StepUnderWay | None = None
        self._undelivered: list[Delta] = []  # where a failure came between
        self._device_seconds = 0.0  # of the step that is being computed
        self.reset_peaks()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # --- requests -----------------------------------------------------------------------------------------------------

    def check_prompt(self, prompt_token_ids: SequenceOf[int]) -> None:
        """Raise UsageError unless the prompt can be computed by this model."""
        vocab = self.runner.model.config.vocab_size
        if not prompt_token_ids:
            raise UsageError("the prompt is empty; give at least one token of text")
        # On a GPU an id out of range would destroy the whole context, not only this request. The loop finds the one to
        # name; the lines above it look at long prompts several times as fast.
        whole = countOf(map(type, prompt_token_ids), int) == len(prompt_token_ids)
        if not whole or min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab:
            for token_id in prompt_token_ids:
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
        params: Params,
        *,
        prompt: str | None = None,
        parent: Sequence | None = None,
        hold: bool = False,
        salt: str | None = None,
        streamed: bool = False,
    ) -> SequenceGroup:
        """Queue a request.

        Args:
            parent: an idle sequence; the beginning that the prompt has in common with it is not computed again.
            hold: keep the completions' blocks when they end: the sequences become idle and can be parents. Of a beam
                search these are the beams that were running last.
            salt: only requests of the same salt find each other's blocks in the prefix cache.
            streamed: of a beam search, report the best beam's text at every step.

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
            forked=params.num_sequences == 1,
            end_ids=tuple({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}),
            salt=salt,
            streamed=streamed,
        )
        if isinstance(params, BeamSearchParams):
            width = params.beam_width // params.num_beam_groups
            group.searches = [
                BeamSearch(width, params.length_penalty, params.early_stopping, group.max_tokens)
                for _ in range(params.num_beam_groups)
            ]
        self.scheduler.add(group)
        self.groups[request_id] = group
        return group

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def _new_sequence(
        self, token_ids: list[int], num_prompt_tokens: int, seed: int, index: int, params: Params
    ) -> Sequence:
        mixed = (seed + index * _SEED_STEP) & ((1 << 64) - 1)
        prompt_ids = token_ids[:num_prompt_tokens]
        return Sequence(
            seq_id=self._new_seq_id(),
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

    def fork_idle(self, sequence: Sequence, num_tokens: int | None = None) -> Sequence:
        """Another idle sequence that shares the first ``num_tokens`` tokens (all by default) of an idle one."""
        count = len(sequence.token_ids) if num_tokens is None else num_tokens
        child = Sequence(self._new_seq_id(), sequence.token_ids[:count], count, sequence.seed)
        if sequence.table is not None:
            child.num_computed = min(count, sequence.num_computed)
            child.table = self.cache.fork(sequence.table, child.seq_id, child.num_computed)
            self.scheduler.keep_idle(child)
        return child

    def pin(self, sequence: Sequence) -> None:
        """Keep an idle sequence's blocks under any load: a system prompt's, say. `unpin` lets it go.

        Raises:
            CapacityError: more than half of the pool would be pinned.
        """
        self.scheduler.pin(sequence)

    def unpin(self, sequence: Sequence) -> None:
        """Free a pinned sequence's blocks."""
        self.scheduler.unpin(sequence)

    def take_finished(self) -> list[RequestOutput]:
        """The requests that have finished since the last call, in the order in which they did."""
        finished = list(self.finished.values())
        self.finished.clear()
        return finished

    def cache_stats(self) -> CacheStats:
        """Token-true figures of this moment, and what has happened since the start (or `reset_peaks`)."""
        swap = self.scheduler.swap
        return replace(
            self.cache.stats(),
            num_preemptions=self.scheduler.num_preemptions,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
            host_blocks_used=swap.num_blocks - swap.num_free,
            pinned_blocks=self.scheduler.num_pinned_blocks,
            peak_used_blocks=self._peak_used,
            mean_used_blocks=self._sum_used / self._steps_counted if self._steps_counted else 0.0,
        )

    def reset_peaks(self) -> None:
        """Begin to count peak and mean use anew: a run begins."""
        self._peak_used = self._sum_used = self._steps_counted = 0

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Compute one step, and perhaps launch the next; returns what it added to each completion.

        If the device fails, every request that was part of the step ends with the error, its blocks are freed, and the
        exception is raised: the engine itself stays usable, unless several ranks share the model.

        Raises:
            RankDied: another rank has ended; every later step raises it, too.
        """
        with self.runner.watched():
            return self._step()

    def _step(self) -> list[Delta]:
        began, self._device_seconds = time.monotonic(), 0.0
        deltas, self._undelivered = self._undelivered + self.carry_out_aborts(), []
        step = self._under_way if self._under_way is not None and self._under_way.is_wanted else self._launch()
        self._under_way = None
        if step is None:
            assert not self.scheduler.has_work, "no progress: there is work, and nothing of it can run"
            return deltas
        failure: Exception | None = None
        if step.may_run_ahead:
            try:
                self._under_way = self._launch()
            except Exception as error:
                failure = error  # that step's; this one has yet to be concluded
        try:
            deltas += self._conclude(step)
        except Exception as error:
            for each in (step, self._under_way):
                if each is not None:
                    self._fail_step(each, f"{type(error).__name__}: {error}")
            self._under_way, failure = None, error
        if failure is not None:
            self._undelivered = deltas
            raise failure
        if self._under_way is not None and not self._under_way.is_wanted:
            self._discard(self._under_way)
            self._under_way = None
        self.last_step = self._report(step.schedule, began, time.monotonic())
        return deltas

    def _report(self, schedule: Schedule, began: float, ended: float) -> StepReport:
        return StepReport(
            number=self.num_steps,
            num_prefills=len(schedule.prefills),
            num_prefill_tokens=sum(chunk.count for chunk in schedule.prefills),
            num_decodes=len(schedule.decodes),
            num_preempted=len(schedule.preempted),
            num_swapped_out=len(schedule.swap_out),
            num_swapped_in=len(schedule.swap_in),
            seconds=ended - began,
            device_seconds=self._device_seconds,
            ended=ended,
        )

    def _launch(self) -> StepUnderWay | None:
        """Schedule a step and give it to the device; None where nothing can run."""
        schedule = self.scheduler.schedule()
        chunks = schedule.chunks
        if not chunks:
            # A group that had to go while all others only wait for their last token: its blocks must be saved now.
            self.runner.move(schedule)
            return None
        used = self.cache.num_blocks - self.cache.num_free
        self._peak_used, self._sum_used = max(self._peak_used, used), self._sum_used + used
        self._steps_counted += 1
        now = time.monotonic()
        for chunk in chunks:
            if chunk.group.metrics.first_scheduled_time is None:
                chunk.group.metrics.first_scheduled_time = now
        step = StepUnderWay(schedule, None, [], None, [], False)
        try:
            launched = time.monotonic()
            step.logits, sampled = self.runner.run(schedule, self.cache.take_copies())
            self._device_seconds += time.monotonic() - launched
            step.draws, step.searching = self.draws_of(sampled, self.note_computed(schedule))
            rows = [row for _, row in step.draws]
            keeps_tokens = self.runner.keeps_tokens(rows)
            if rows:
                launched = time.monotonic()
                step.drawn = self.runner.draw(step.logits, rows, len(schedule.decodes), keeps_tokens)
                self._device_seconds += time.monotonic() - launched
            step.may_run_ahead = not step.searching and keeps_tokens
        except Exception as error:
            self._fail_step(step, f"{type(error).__name__}: {error}")
            raise
        for row in rows:
            row.sequence.num_pending += 1
        self.num_steps += 1
        return step

    def _conclude(self, step: StepUnderWay) -> list[Delta]:
        """Wait for a step's tokens and add them to their sequences."""
        waited = time.monotonic()
        tokens, broken = step.drawn.wait() if step.drawn is not None else ([], [])
        self._device_seconds += time.monotonic() - waited
        deltas: list[Delta] = []
        searching = [each for each in step.searching if not each[0].finished]
        if searching and step.logits is not None:
            deltas += self._advance_beams(step.logits, searching)
        for (group, row), token, is_broken in zip(step.draws, tokens, broken, strict=True):
            sequence = row.sequence
            sequence.num_pending -= 1
            if sequence.finished:
                continue
            if is_broken or (self._errors and group.request_id in self._errors):
                self._note_nan(group)
            else:
                deltas.append(self.append_token(group, sequence, token))
        groups = {id(group): group for group, _ in step.draws} | {id(group): group for group, _ in searching}
        for group in groups.values():
            if group.request_id not in self.groups:
                continue
            if group.request_id in self._errors:
                deltas += self._end(group, "abort")
            elif group.finished:
                self._retire(group)
        return deltas

    def _note_nan(self, group: SequenceGroup) -> None:
        """A group's logits are NaN: it ends with an error, and nobody may find its blocks."""
        self._errors[group.request_id] = "the model produced NaN; another dtype may help: float32 or bfloat16"
        for sequence in group.unfinished:
            if sequence.table is not None:
                self.cache.distrust(sequence.table)

    def _fail_step(self, step: StepUnderWay, error: str) -> None:
        """The device failed: end every request that was part of the step."""
        self._discard(step)
        self.runner.forget()
        for chunk in step.schedule.chunks:
            if chunk.sequence.table is not None:
                self.cache.distrust(chunk.sequence.table)
        for group in {id(chunk.group): chunk.group for chunk in step.schedule.chunks}.values():
            if group.request_id in self.groups:
                self._fail(group, error)
        for group in step.schedule.preempted:
            if group.swapped:
                self.scheduler.start_over(group)  # nobody knows how much of it reached the host

    def _discard(self, step: StepUnderWay) -> None:
        for _, row in step.draws:
            row.sequence.num_pending = 0

    def note_computed(self, schedule: Schedule) -> set[int]:
        """Note what is computed, make full blocks findable, and fork groups whose prompt is complete.

        What the device writes, it writes in the order of the steps: later steps may rely on it before it is done.

        Returns:
            The ``seq_id`` of sequences from whose row all sequences of their group draw their first token.
        """
        first_draws: set[int] = set()
        size = self.cache.block_size
        for chunk in schedule.chunks:
            group, sequence, table = chunk.group, chunk.sequence, chunk.sequence.table
            assert table is not None
            computed = sequence.num_computed = sequence.num_computed + chunk.count
            if computed // size > len(table.nodes):
                self.cache.commit(table, sequence.token_ids, min(computed, len(sequence.token_ids)))
            if not group.forked and computed == group.num_prompt_tokens:
                if group.searches and not group.beams:
                    continue  # the first step of the search makes the other beams
                self._fork(group, sequence)
                first_draws.add(sequence.seq_id)
        return first_draws

    def draws_of(
        self, sampled: list[ScheduledChunk], first_draws: set[int]
    ) -> tuple[list[tuple[SequenceGroup, SampleRow]], list[tuple[SequenceGroup, dict[int, int]]]]:
        """The tokens to draw, and the beam searches to advance with the row of logits of each of their sequences."""
        draws: list[tuple[SequenceGroup, SampleRow]] = []
        searching: dict[int, tuple[SequenceGroup, dict[int, int]]] = {}
        for number, chunk in enumerate(sampled):
            group, sequence, params = chunk.group, chunk.sequence, chunk.group.params
            if isinstance(params, BeamSearchParams):
                searching.setdefault(id(group), (group, {}))[1][sequence.seq_id] = number
            elif first_draws and sequence.seq_id in first_draws:
                draws += [(group, SampleRow(params, each, number, group.end_ids)) for each in group.unfinished]
            else:
                draws.append((group, SampleRow(params, sequence, number, group.end_ids)))
        return draws, list(searching.values())

    def _fork(self, group: SequenceGroup, leader: Sequence) -> None:
        """Share the computed prompt with the group's other sequences; the first time, make them."""
        assert leader.table is not None
        prompt = leader.token_ids[: leader.num_prompt_tokens]
        count = len(group.sequences) if group.searches else group.params.num_sequences
        for index in range(len(group.sequences), count):
            group.sequences.append(self._new_sequence(list(prompt), len(prompt), group.seed, index, group.params))
        for sequence in group.unfinished:
            if sequence is not leader:
                sequence.table = self.cache.fork(leader.table, sequence.seq_id, len(prompt))
                sequence.num_computed = len(prompt)
        group.forked = True

    def append_token(self, group: SequenceGroup, sequence: Sequence, token: TokenLogprobs) -> Delta:
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

    # --- beam search --------------------------------------------------------------------------------------------------

    def _advance_beams(self, logits: Tensor, searching: list[tuple[SequenceGroup, dict[int, int]]]) -> list[Delta]:
        """One step of every beam search whose beams have been computed."""
        steps = self.beam_steps(searching)
        deltas = []
        found = beam_candidates(logits, steps)
        for (group, _), step, candidates in zip(searching, steps, found, strict=True):
            if any(math.isnan(candidate.logprob) for each in candidates for candidate in each):
                self._note_nan(group)
                continue
            deltas += self.advance_beams_of(group, step, candidates, self._beam_logprobs(logits, step, candidates))
        return deltas

    def beam_steps(self, searching: list[tuple[SequenceGroup, dict[int, int]]]) -> list[BeamStep]:
        """What `beam_candidates` needs to know of each search."""
        steps = []
        for group, row_of in searching:
            assert isinstance(group.params, BeamSearchParams)
            beams = group.beams or [[group.sequences[0]]] * len(group.searches)
            rows = [[row_of[sequence.seq_id] for sequence in each] for each in beams]
            steps.append(BeamStep(group.params, group.searches, rows, beams, group.end_ids))
        return steps

    def _beam_logprobs(
        self, logits: Tensor, step: BeamStep, candidates: list[list[Candidate]]
    ) -> dict[tuple[int, int], TokenLogprobs]:
        """The model's own log-probabilities of all continuations, where the request wants them."""
        if step.params.logprobs is None:
            return {}
        pairs = [
            (rows[candidate.beam], candidate.token_id)
            for rows, each in zip(step.rows, candidates, strict=True)
            for candidate in each
        ]
        wanted = list(dict.fromkeys(pairs))
        return dict(zip(wanted, token_logprobs(logits, wanted, step.params.logprobs), strict=True))

    def advance_beams_of(
        self,
        group: SequenceGroup,
        step: BeamStep,
        candidates: list[list[Candidate]],
        logprobs: dict[tuple[int, int], TokenLogprobs],
    ) -> list[Delta]:
        """Choose the beams that live on, and fork, append and free accordingly. No K or V moves."""
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.monotonic()
        survivors: list[list[Candidate]] = []
        for search, rows, beams, each in zip(step.searches, step.rows, step.sequences, candidates, strict=True):
            if search.done:
                survivors.append([])
                continue

            def finished(
                candidate: Candidate, rows: list[int] = rows, beams: list[Sequence] = beams
            ) -> CompletionOutput:
                token = logprobs.get((rows[candidate.beam], candidate.token_id))
                return finished_beam(self.tokenizer, step, beams[candidate.beam], candidate.token_id, token)

            def ends(candidate: Candidate, beams: list[Sequence] = beams) -> bool:
                return ending_of(self.tokenizer, step, beams[candidate.beam], candidate.token_id) is not None

            survivors.append(search.advance(each, ends, finished))
        if all(search.done for search in step.searches):
            for sequence in group.sequences:
                self._end_sequence(group, sequence, "stop")
        else:
            self._replace_beams(group, step, survivors, logprobs)
        return [best_beam(self.tokenizer, group)] if group.streamed else []

    def _replace_beams(
        self,
        group: SequenceGroup,
        step: BeamStep,
        survivors: list[list[Candidate]],
        logprobs: dict[tuple[int, int], TokenLogprobs],
    ) -> None:
        taken: set[int] = set()
        tokens: list[tuple[Sequence, int, TokenLogprobs | None]] = []
        beams: list[list[Sequence]] = []
        for rows, parents, chosen in zip(step.rows, step.sequences, survivors, strict=True):
            beams.append([])
            for candidate in chosen:
                parent = parents[candidate.beam]
                sequence = parent
                if parent.seq_id in taken:
                    sequence = self._fork_beam(parent)
                taken.add(parent.seq_id)
                beams[-1].append(sequence)
                tokens.append((sequence, candidate.token_id, logprobs.get((rows[candidate.beam], candidate.token_id))))
        for sequence in group.sequences:
            if sequence.seq_id not in taken:
                self.scheduler.finish(sequence)
        # Only now: a parent's history must be copied before it grows.
        for index, (sequence, token_id, token) in enumerate(tokens):
            sequence.index = index
            sequence.token_ids.append(token_id)
            if token is not None:
                sequence.logprobs.append(token)
        group.beams, group.forked = beams, True
        group.sequences = [sequence for sequence, _, _ in tokens]

    def _fork_beam(self, parent: Sequence) -> Sequence:
        assert parent.table is not None
        seq_id = self._new_seq_id()
        return Sequence(
            seq_id=seq_id,
            token_ids=parent.token_ids.copy(),
            num_prompt_tokens=parent.num_prompt_tokens,
            seed=parent.seed,
            num_computed=parent.num_computed,
            table=self.cache.fork(parent.table, seq_id),
            logprobs=parent.logprobs.copy(),
        )

    # --- endings ------------------------------------------------------------------------------------------------------

    def _end_sequence(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        table = sequence.table
        if table is not None and group.request_id not in self._errors:
            self.cache.commit(table, sequence.token_ids, min(sequence.num_computed, len(sequence.token_ids)))
        if group.hold and table is not None:
            last = len(sequence.token_ids) - 1
            if table.num_tokens > last and sequence.num_output_tokens:  # a step that ran ahead has computed it, too
                sequence.seq_id = self._new_seq_id()
                sequence.table = self.cache.fork(table, sequence.seq_id, last)
                sequence.num_computed = last
                self.cache.free(table)
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
        prompt = group.sequences[0].token_ids[: group.num_prompt_tokens]
        if group.searches:
            outputs = beam_outputs(self.tokenizer, group)
        else:
            outputs = [
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
            ]
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=prompt,
            outputs=outputs,
            finished=group.finished,
            num_cached_tokens=group.num_cached_tokens,
            metrics=group.metrics,
            error=error,
        )
