"""The requests under way: a request becomes a group of sequences, its sequences end, an output leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import countOf

from minillm.checks import shown
from minillm.engine.scheduler import Scheduler
from minillm.errors import UsageError
from minillm.outputs import Delta, FinishReason, RequestMetrics, RequestOutput
from minillm.params import Params
from minillm.sequence import Method, Sequence, SequenceGroup, Stage
from minillm.text.tokenizer import Tokenizer


@dataclass
class Requests:
    """All groups that have not ended, and the outputs of those that have.

    ``tokenizer`` is None for a model without text (dummy weights): requests are token ids then, and outputs too.
    """

    scheduler: Scheduler
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    longest_plain_prompt: int | None = None  # K of longer prompts depends on their length (dynamic rope scaling)
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)  # until somebody takes them
    errors: dict[str, str] = field(default_factory=dict)  # of groups that are about to end for them
    _next_seq_id: int = 0

    # --- a request becomes a group ------------------------------------------------------------------------------------

    def check_prompt(self, token_ids: SequenceOf[int]) -> None:
        """Raise UsageError unless the prompt can be computed by this model."""
        if not token_ids:
            raise UsageError("the prompt is empty; give at least one token of text")
        # On a GPU an id out of range would destroy the whole context, not only this request. The loop finds the one to
        # name; the lines above it look at long prompts several times as fast.
        whole = countOf(map(type, token_ids), int) == len(token_ids)
        if not whole or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                    raise UsageError(f"token id {shown(token_id)} in the prompt is not from 0 to {self.vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens and the context holds {self.max_model_len}, "
                "one of them for the answer; shorten the prompt or raise max_model_len"
            )

    def add(
        self,
        request_id: str,
        token_ids: SequenceOf[int],
        params: Params,
        method: Method,
        *,
        prompt: str | None = None,
        parent: Sequence | None = None,
        hold: bool = False,
        salt: str | None = None,
    ) -> SequenceGroup:
        """Make a group and queue it; see `minillm.engine.engine.Engine.add_request`."""
        if request_id in self.groups:
            raise UsageError(f"request id {request_id!r} is in use; wait until it has finished or choose another")
        self.check_prompt(token_ids)
        bad_words = self._bad_words(params)
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("bad_words", [token_id for word in bad_words for token_id in word]),
        ):
            if any(token_id >= self.vocab_size for token_id in ids):
                raise UsageError(f"{name}: token id {max(ids)} is not below the vocabulary's size {self.vocab_size}")
        group = SequenceGroup(
            request_id=request_id,
            params=params,
            method=method,
            max_tokens=min(params.max_tokens, self.max_model_len - len(token_ids)),
            sequences=[Sequence(self.new_seq_id(), list(token_ids), len(token_ids))],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            stage=Stage.SPLIT if params.num_sequences == 1 else Stage.PROMPT,
            prompt=prompt,
            parent=parent,
            hold=hold,
            salt=self.salt_for(len(token_ids), salt),
            end_ids=tuple({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}),
            bad_words=bad_words,
        )
        method.begin(group)
        self.scheduler.add(group)
        self.groups[request_id] = group
        return group

    def salt_for(self, num_prompt_tokens: int, salt: str | None) -> str | None:
        """The salt of a prompt's blocks: where K depends on the prompt's length, only prompts of that length share."""
        if self.longest_plain_prompt is None or num_prompt_tokens <= self.longest_plain_prompt:
            return salt
        return f"{num_prompt_tokens} tokens {'' if salt is None else salt}"

    def new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def _bad_words(self, params: Params) -> tuple[tuple[int, ...], ...]:
        """The runs of token ids that must not be generated; a text at the start of a line and within one."""
        runs: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if not isinstance(word, str):
                runs[tuple(word)] = None
            elif self.tokenizer is None:
                raise UsageError("bad_words: this model has no tokenizer; give token ids instead of text")
            else:
                for text in (word.lstrip(), f" {word.lstrip()}"):
                    runs[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return tuple(runs)

    def fork(self, parent: Sequence, num_tokens: int) -> Sequence:
        """Another sequence with the first tokens of ``parent`` and a table that shares their blocks."""
        assert parent.table is not None
        child = Sequence(self.new_seq_id(), parent.token_ids[:num_tokens], parent.num_prompt_tokens)
        child.num_computed = min(num_tokens, parent.num_computed)
        child.table = self.scheduler.cache.fork(parent.table, child.seq_id, child.num_computed)
        return child

    def fork_prompt(self, group: SequenceGroup, leader: Sequence) -> None:
        """Share the prompt that ``leader`` has computed with the group's other sequences."""
        assert leader.table is not None
        for sequence in group.unfinished:
            if sequence is not leader:
                sequence.num_computed = leader.num_prompt_tokens
                sequence.table = self.scheduler.cache.fork(leader.table, sequence.seq_id, sequence.num_computed)
        group.stage = Stage.SPLIT

    # --- sequences end ------------------------------------------------------------------------------------------------

    def end_sequence(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence. Its blocks are free then, or idle if the request holds them."""
        sequence.finish_reason = reason
        table = sequence.table
        if table is not None and group.request_id not in self.errors:
            computed = min(sequence.num_computed, len(sequence.token_ids))
            self.scheduler.cache.commit(table, sequence.token_ids, computed)
        if group.hold and table is not None:
            last = len(sequence.token_ids) - 1
            if table.num_tokens > last and sequence.num_output_tokens:  # a step that ran ahead has computed it, too
                sequence.seq_id = self.new_seq_id()
                sequence.table = self.scheduler.cache.fork(table, sequence.seq_id, last)
                sequence.num_computed = last
                self.scheduler.cache.free(table)
            self.scheduler.idle.keep(sequence)
        else:
            self.scheduler.free(sequence)

    def note_nan(self, group: SequenceGroup) -> None:
        """A group's logits are NaN: it will end with an error, and no request may find its blocks."""
        self.errors[group.request_id] = "the model produced NaN; another dtype may help: float32 or bfloat16"
        for sequence in group.unfinished:
            if sequence.table is not None:
                self.scheduler.cache.distrust(sequence.table)

    def fail(self, group: SequenceGroup, error: str) -> None:
        """End a group with an error."""
        self.errors[group.request_id] = error
        self.end([group])

    def end(self, groups: SequenceOf[SequenceGroup]) -> list[Delta]:
        """End all unfinished sequences of ``groups`` now, as aborted."""
        deltas = []
        for group in groups:
            for sequence in group.unfinished:
                text = "" if sequence.text is None else sequence.text.cut_off()
                self.end_sequence(group, sequence, "abort")
                deltas.append(Delta(group.request_id, sequence.index, text, [], "abort"))
        self.retire(groups)
        return deltas

    def retire(self, groups: SequenceOf[SequenceGroup]) -> None:
        """Free everything that finished groups still hold, and record their outputs."""
        self.scheduler.remove(groups)
        for group in groups:
            group.metrics.finished_time = time.monotonic()
            del self.groups[group.request_id]
            self.finished[group.request_id] = self.output_of(group)
            self.errors.pop(group.request_id, None)

    # --- an output leaves ---------------------------------------------------------------------------------------------

    def output_of(self, group: SequenceGroup) -> RequestOutput:
        """Everything that a group has generated so far."""
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.sequences[0].token_ids[: group.num_prompt_tokens],
            outputs=group.method.outputs(group),
            finished=group.finished,
            num_cached_tokens=group.num_cached_tokens,
            metrics=group.metrics,
            error=self.errors.get(group.request_id),
        )
