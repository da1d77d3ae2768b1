"""Sampling as a decoding method: every sequence draws its own next token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from minillm.engine.failures import fail_nan
from minillm.engine.forks import at_all_depths, fork_at_depth
from minillm.engine.requests import Requests
from minillm.outputs import CompletionOutput, Delta, FinishReason, TokenLogprobs
from minillm.params import SamplingParams
from minillm.runner.drawn import Drawn
from minillm.runner.runner import Runner
from minillm.sequence import PROMPT, Chunk, Flight, Sequence, SequenceGroup
from minillm.text.stop import OutputText

_SEED_STEP = 0x9E3779B97F4A7C15  # keeps the seeds of a request's samples apart


class Samples:
    """The decoding method of sampled requests (`minillm.sequence.Method`). ``seed``: for requests without a seed."""

    def __init__(self, requests: Requests, runner: Runner, seed: int = 0) -> None:
        self.requests, self._runner, self._random = requests, runner, random.Random(seed)

    def begin(self, group: SequenceGroup) -> None:
        assert isinstance(group.params, SamplingParams)
        sequence, seed, tokenizer = group.sequences[0], group.params.seed, self.requests.tokenizer
        sequence.index = len(group.params.reasoning_depths)  # the deepest answer is the last one
        sequence.seed = self._random.getrandbits(63) if seed is None else seed
        if tokenizer is not None:
            detokenizer = tokenizer.detokenizer(sequence.token_ids)
            sequence.text = OutputText(detokenizer, tuple(group.params.stop), group.params.min_tokens)

    def due(self, group: SequenceGroup) -> list[Chunk]:
        if group.stage is PROMPT:
            leader = group.computing[0]
            return [Chunk(group, leader, leader.num_prompt_tokens - leader.num_computed, False)]
        chunks = []
        for sequence in group.sequences:
            if sequence.finish_reason is None:
                pending = sequence.num_pending
                total = len(sequence.token_ids) + pending
                if pending and total - sequence.num_prompt_tokens >= group.max_tokens:
                    continue  # the pending token is its last one
                missing = total - sequence.num_computed
                if missing == 1:
                    chunks.append(sequence.decode or Chunk.last_token(group, sequence))
                else:
                    chunks.append(Chunk(group, sequence, missing, False))
        return chunks

    def prompt_computed(self, group: SequenceGroup, leader: Sequence) -> None:
        assert isinstance(group.params, SamplingParams)
        if group.params.reasoning_depths:
            fork_at_depth(self.requests, group, leader)
        for index in range(len(group.sequences), group.params.n):  # create the others, once
            mixed = (leader.seed + index * _SEED_STEP) & ((1 << 64) - 1)
            prompt = leader.token_ids[: leader.num_prompt_tokens]
            other = Sequence(self.requests.new_seq_id(), prompt, leader.num_prompt_tokens, index)
            other.seed = mixed - (1 << 64) if mixed >> 63 else mixed
            other.text = None if leader.text is None else leader.text.copy()
            other.matcher = None if leader.matcher is None else self.requests.grammars.matcher(group.params)
            other.reasoning_position = None if leader.reasoning_position is None else leader.reasoning_position.copy()
            group.sequences.append(other)
        self.requests.fork_prompt(group, leader)

    def launch(self, logits: Tensor, chunks: list[Chunk]) -> Flight:
        return self.draw(logits, chunks)

    def draw(self, logits: Tensor, chunks: list[Chunk]) -> PendingDraws:
        """Begin to draw the next token of each chunk's sequence. After a prompt, all sequences of a group draw one."""
        draws = []
        for chunk in chunks:
            draws.append(chunk)
            if len(chunk.group.sequences) > 1 and chunk.sequence.num_tokens == chunk.sequence.num_prompt_tokens:
                # The group's other sequences also draw their first token from the prompt's logits.
                group, leader = chunk.group, chunk.sequence
                draws += [Chunk(group, each, 0, False, chunk.row) for each in group.unfinished if each is not leader]
        drawn = self._runner.draw(logits, draws)
        for draw in draws:
            draw.sequence.num_pending += 1
        return PendingDraws(self, draws, drawn, drawn.may_run_ahead, drawn.may_compute_ahead)

    def outputs(self, group: SequenceGroup) -> list[CompletionOutput]:
        outputs = []
        for each in group.sequences:
            text = "" if each.text is None else each.text.text
            wanted = group.params.logprobs is not None
            total, logprobs = (each.cumulative_logprob, each.logprobs) if wanted else (None, None)
            ids, end = each.output_token_ids, each.finish_reason
            outputs.append(CompletionOutput(each.index, text, ids, total, logprobs, end, each.stop_reason))
        return at_all_depths(outputs)

    def append(self, group: SequenceGroup, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> Delta:
        """Append a drawn token to its sequence, and end the sequence if this is its last token."""
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.monotonic()
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs.logprob
        text, output = "", sequence.text
        reason: FinishReason | None = None
        if token_id in group.end_ids:
            reason = "stop"
            if token_id in tuple(group.params.stop_token_ids):
                sequence.stop_reason = token_id
        else:
            if output is not None:
                text = output.push(token_id)
            if sequence.matcher is not None and sequence.matcher.is_complete(group.end_ids):
                reason = "stop"
            elif sequence.num_output_tokens >= group.max_tokens:
                reason = "length"
        if output is not None:
            if reason is not None:
                text += output.finish()
            if output.matched is not None:
                reason, sequence.stop_reason = "stop", output.matched
        if reason is not None:
            self.requests.end_sequence(group, sequence, reason)
        elif group.params.num_sequences > 1 and sequence is group.sequences[0]:
            fork_at_depth(self.requests, group, sequence)
        return Delta(group.request_id, sequence.index, text, [token_id], reason, sequence.stop_reason)


@dataclass(slots=True)
class PendingDraws:
    """The tokens that one step draws for sampled requests, as a `minillm.sequence.Flight`."""

    samples: Samples
    chunks: list[Chunk]  # one for each drawn token
    drawn: Drawn
    may_run_ahead: bool
    may_compute_ahead: bool
    results: tuple[list[int], list[TokenLogprobs | None], list[bool]] = ([], [], [])

    @property
    def groups(self) -> Iterator[SequenceGroup]:
        return (chunk.group for chunk in self.chunks)

    def wait(self) -> None:
        self.results = self.drawn.wait()

    def conclude(self) -> list[Delta]:
        deltas, append = [], self.samples.append
        for draw, token_id, logprobs, is_nan in zip(self.chunks, *self.results, strict=True):
            group, sequence = draw.group, draw.sequence
            sequence.num_pending -= 1
            if sequence.finish_reason is not None:
                continue
            try:
                if is_nan:
                    fail_nan(self.samples.requests, group)
                elif group.error is None and self.samples.requests.advance(group, sequence, token_id):
                    deltas.append(append(group, sequence, token_id, logprobs))
            except Exception as error:
                self.samples.requests.scheduler.fail(group, error)
        return deltas

    def discard(self) -> None:
        for chunk in self.chunks:
            chunk.sequence.num_pending = 0
