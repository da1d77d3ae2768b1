"""Turn requests into groups of sequences, and ended sequences into outputs."""

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field

from minillm.blockstore.tier import DiskTier
from minillm.engine.grammars import Grammars
from minillm.engine.reasoning_limits import ReasoningLimits
from minillm.engine.request_fields import bad_word_ids, check_ids, check_prompt, salt_for
from minillm.engine.scheduler import Scheduler
from minillm.errors import CapacityError, MinillmError, RequestError, UsageError, as_known
from minillm.outputs import Delta, FinishReason, RequestMetrics, RequestOutput
from minillm.params import Params
from minillm.prompt_scores import PromptScores
from minillm.runner.masks import bits_of
from minillm.sequence import Method, Sequence, SequenceGroup, Stage
from minillm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it.

    Attributes:
        prompt: the prompt's text, for the output.
        parent: an idle sequence. Tokens that the beginning of the prompt has in common with it are not computed again.
        hold: keep the completions' blocks when they end: the sequences become idle and can be parents.
        pin: with ``hold``, pin the completion when it ends, if it can be pinned.
        salt: only requests with the same salt share blocks in the prefix cache.
        streamed: `Driver.run` also yields the request's deltas.
        offline: nobody reads the answer token by token. Steps that decode only such requests may compute more prompt
            tokens.
        request_id: if empty, the driver generates one.
        owner: a name, such as that of a conversation, under which blocks on disk can be erased again. Empty: write no
            block of the request to disk, and read none.
        score_from: with ``prompt_logprobs``, the first token to score. Earlier blocks may come from the prefix cache.
        in_reasoning: the prompt ends inside the reasoning, also if the opening tag is not among its last tokens.
    """

    token_ids: SequenceOf[int]
    params: Params
    prompt: str | None = None
    parent: Sequence | None = None
    hold: bool = False
    pin: bool = False
    salt: str | None = None
    streamed: bool = False
    offline: bool = False
    request_id: str = ""
    owner: str | None = None
    score_from: int = 1
    in_reasoning: bool = False


@dataclass
class Requests:
    """All groups that wait or run, and finished groups until their outputs are taken."""

    scheduler: Scheduler
    tokenizer: Tokenizer | None  # None: prompts and outputs are token ids only
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    longest_plain_prompt: int | None = None  # K of longer prompts depends on their length (dynamic rope scaling)
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    finished: dict[str, SequenceGroup] = field(default_factory=dict)  # until their outputs are taken
    owner: str | None = None  # the owner of requests that name none
    _seq_ids: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)
        self.reasoning = ReasoningLimits(self.tokenizer, self.eos_token_ids)

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier of the prefix cache, if there is one."""
        return self.scheduler.admission.tier

    def has(self, group: SequenceGroup) -> bool:
        """Return whether ``group`` waits or runs. After it has ended, another group may have its id."""
        return self.groups.get(group.request_id) is group

    def check_prompt(self, token_ids: SequenceOf[int], num_new: int = 1) -> None:
        """Raise UsageError unless this model can compute the prompt and ``num_new`` tokens, 0 or 1, after it."""
        check_prompt(token_ids, self.vocab_size, self.max_model_len, num_new)

    def add(self, request: Request, method: Method) -> SequenceGroup:
        """Create a group and queue it; see `minillm.engine.engine.Engine.add`."""
        request_id, token_ids, params = request.request_id, request.token_ids, request.params
        if request_id in self.groups or request_id in self.finished:
            raise UsageError(f"request id {request_id!r} is in use; wait until its output is taken or choose another")
        self.check_prompt(token_ids, min(1, params.max_tokens))
        if params.stop and self.tokenizer is None:
            raise UsageError("stop: this model has no tokenizer; give stop_token_ids instead of text")
        bad_words = bad_word_ids(params, self.tokenizer)
        check_ids(params, bad_words, self.vocab_size)
        allowed, matcher = params.allowed_token_ids, self.grammars.matcher(params)
        position = self.reasoning.position(params, token_ids)
        sequence = Sequence(self.new_seq_id(), list(token_ids), len(token_ids), matcher=matcher)
        sequence.reasoning_position = position
        group = SequenceGroup(
            request_id=request_id,
            params=params,
            method=method,
            max_tokens=min(params.max_tokens, self.max_model_len - len(token_ids)),
            sequences=[sequence],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            stage=Stage.SPLIT if params.num_sequences == 1 else Stage.PROMPT,
            prompt=request.prompt,
            parent=request.parent,
            hold=request.hold,
            pin=request.pin,
            salt=salt_for(request.salt, len(token_ids), self.longest_plain_prompt),
            end_ids=tuple({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}),
            bad_words=bad_words,
            allowed=None if allowed is None else bits_of(list(allowed), self.vocab_size),
            streamed=request.streamed,
            offline=request.offline,
            owner=self.owner if request.owner is None else request.owner,
            in_reasoning=request.in_reasoning,
        )
        if params.prompt_logprobs is not None:
            group.scores = PromptScores(params.prompt_logprobs, max(1, request.score_from), [None] * len(token_ids))
        try:
            method.begin(group)
            self.scheduler.add(group)
        except MinillmError:
            raise
        except Exception as error:
            self.scheduler.fail(group, error)
        self.groups[request_id] = group
        return group

    def new_seq_id(self) -> int:
        return next(self._seq_ids)

    def fork_prompt(self, group: SequenceGroup, leader: Sequence) -> None:
        """Fork the computed prompt of ``leader`` for the group's other sequences."""
        for sequence in group.unfinished:
            if sequence is not leader:
                sequence.num_computed = leader.num_prompt_tokens
                sequence.table = self.scheduler.cache.fork(leader.own_table, sequence.seq_id, sequence.num_computed)
        group.stage = Stage.SPLIT

    def end_sequence(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence. Free its blocks, or make it an idle sequence if the request has ``hold`` set."""
        sequence.finish_reason = reason
        is_sound = sequence.table is not None and group.error is None
        if is_sound:
            self.commit(group, sequence, sequence.num_computed)
        if is_sound and group.hold:
            self.scheduler.idle.keep_ended(sequence, self.new_seq_id)
            if self.disk is not None and group.owner:
                kept = sequence.token_ids[: sequence.num_computed]
                self.disk.add_tail(sequence.own_table, kept, group.owner)
        else:
            self.scheduler.preemption.free(sequence)

    def commit(self, group: SequenceGroup, sequence: Sequence, num_computed: int) -> None:
        """Add a sequence's full computed blocks to the prefix cache, and to the queue of the disk tier, if any."""
        table = sequence.own_table
        self.scheduler.cache.commit(table, sequence.token_ids, min(num_computed, len(sequence.token_ids)))
        if self.disk is not None and group.owner != "":
            self.disk.add(table, sequence.token_ids, group.owner)

    def advance(self, group: SequenceGroup, sequence: Sequence, token_id: int) -> bool:
        """Advance a sequence's grammar, if any, by ``token_id``. Return False if the group now has an error."""
        matcher = sequence.matcher
        if matcher is not None and not sequence.reasons_with(token_id):
            matcher.advance(token_id, ends=token_id in group.end_ids)
            group.error = group.error or matcher.error
        return group.error is None

    def end(self, groups: SequenceOf[SequenceGroup]) -> list[Delta]:
        """End all unfinished sequences of ``groups`` as aborted, and return their last deltas."""
        deltas: list[Delta] = []
        for group in groups:
            for sequence in group.unfinished:
                text = "" if sequence.text is None else sequence.text.cut_off()
                self.end_sequence(group, sequence, "abort")
                deltas.append(Delta(group.request_id, sequence.index, text, [], "abort"))
        self.retire(groups)
        return deltas

    def end_failed(self) -> list[Delta]:
        """End the groups that `Scheduler.fail` recorded, and return their last deltas."""
        failed, self.scheduler.failed = self.scheduler.failed, []
        return self.end([group for group in dict.fromkeys(failed) if self.has(group)])

    def retire(self, groups: SequenceOf[SequenceGroup]) -> None:
        """Free the blocks and other resources of finished groups, and make their outputs available to `take`."""
        if groups:
            self.scheduler.remove(groups)
        for group in groups:
            if group.error is not None:  # sequences that ended before the error may be idle
                for sequence in group.sequences:
                    self.scheduler.idle.release(sequence)
            elif group.pin:  # before another step can evict it
                with suppress(CapacityError):  # the caller's own `Scheduler.pin` raises it again
                    self.scheduler.pin(group.sequences[0])
            group.metrics.finished_time = time.monotonic()
            del self.groups[group.request_id]
            self.finished[group.request_id] = group

    def take(self, request_id: str) -> RequestOutput:
        """Return the output of a finished request, and forget the request."""
        return self.output_of(self.finished.pop(request_id))

    def output_of(self, group: SequenceGroup) -> RequestOutput:
        """Return everything that a group has generated so far."""
        try:
            outputs = self.reasoning.counted(group, group.method.outputs(group))
        except Exception as error:
            outputs, group.error = [], group.error or RequestError(str(as_known(error)))
            for sequence in group.sequences:
                self.scheduler.idle.release(sequence)
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.sequences[0].token_ids[: group.num_prompt_tokens],
            outputs=outputs,
            finished=group.finished,
            num_cached_tokens=group.num_cached_tokens,
            metrics=group.metrics,
            error=None if group.error is None else group.error.text,
            prompt_logprobs=None if group.scores is None else list(group.scores.tokens),
        )
