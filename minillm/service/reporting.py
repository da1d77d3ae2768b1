"""Report the engine's progress to the app, at the rate that the app asks for."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from minillm.engine.engine import Engine
from minillm.loading.pool_size import device_memory
from minillm.outputs import CompletionOutput, Delta, FinishReason, RequestOutput, StepReport, TokenLogprobs, finite
from minillm.sequence import Sequence, SequenceGroup
from minillm.service import messages
from minillm.service.cache_view import CacheView, Owner
from minillm.speculation.drafts import num_accepted

_INTERVAL = 0.1  # seconds between reports of the pool and the beams, unless `Report` says otherwise
_MOST_STEPS = 100  # per message
_MEMORY_INTERVAL = 2.0  # seconds between checks of the device's memory


@dataclass
class Answer:
    """A running request, or an ended request with blocks that stay in the pool."""

    command: messages.Generate
    group: SequenceGroup
    in_reasoning: bool
    started: bool = False  # `Started` is sent
    sent_at: float = 0.0  # time at which beams or progress of the prompt were last sent
    first_read: tuple[float, int] | None = None  # time and number of computed tokens at the first report of progress
    stays: bool = True  # keep the blocks when the request ends
    num_pinned_tokens: int = 0  # number of the prompt's first tokens to pin, up to the last attached file
    sequences: list[Sequence] = field(default_factory=list)  # idle sequences with blocks, once the request has ended
    outputs: list[CompletionOutput] = field(default_factory=list)  # results of the ended request
    begun: set[int] = field(default_factory=set)  # indexes of completions with text
    output_indices: dict[int, int] = field(default_factory=dict)  # by seq_id, of assigned beams
    read_ahead: SequenceGroup | None = None  # the request that read the conversation's blocks from disk, if any

    @property
    def searches(self) -> bool:
        """Return whether the request uses beam search."""
        return "beam_width" in self.command.params


class Reporter:
    """Collects text, beams, steps and pool changes, and sends them to the app at most once per interval."""

    def __init__(
        self, engine: Engine, send: Callable[[messages.Event], None], owners: Callable[[], Mapping[int, Owner]]
    ) -> None:
        self.send = send
        self.view = CacheView(engine)
        self._engine, self._owners = engine, owners
        self._interval, self._text_interval = _INTERVAL, 0.0
        self._last_picture = self._last_text = self._last_memory = 0.0
        self._unsent: dict[tuple[str, int], messages.TextDelta] = {}  # by request and completion
        self._steps: list[StepReport] = []  # not sent yet
        self._last_step = engine.figures.last_step

    def set_interval(self, seconds: float) -> None:
        """Set the minimum number of seconds between reports of each kind."""
        self._interval = self._text_interval = seconds

    def add_delta(self, answer: Answer, delta: Delta) -> None:
        """Add the text that one step generated for one completion of a sampled answer."""
        self._send_start(answer)
        sequence = next((each for each in answer.group.sequences if each.index == delta.index), None)
        if sequence is None or answer.searches:
            return
        key = (delta.request_id, delta.index)
        if delta.text or delta.token_ids:
            chosen = sequence.logprobs[-len(delta.token_ids) :] if delta.token_ids else []
            text = self._unsent.setdefault(key, messages.TextDelta(*key, "", 0))
            if delta.index not in answer.begun:
                answer.begun.add(delta.index)
                text.num_tokens = text.num_shared = sequence.num_output_tokens - len(delta.token_ids)
                if text.num_shared and sequence.text is not None:  # it has forked from another completion
                    text.text = sequence.text.text.removesuffix(delta.text)
            text.text += delta.text
            text.num_tokens += len(delta.token_ids)
            text.tokens += [self._choice(each) for each in chosen]
        if delta.finish_reason is not None:
            self._send_end(answer, delta.index, delta.finish_reason, sequence.num_output_tokens)

    def _choice(self, token: TokenLogprobs) -> messages.TokenChoice:
        assert self._engine.tokenizer is not None
        text = self._engine.tokenizer.token_text
        texts = [text(token_id) for token_id, _ in token.top]
        logprobs = [finite(logprob) for _, logprob in token.top]
        return messages.TokenChoice(text(token.token_id), finite(token.logprob), texts, logprobs)

    def _send_start(self, answer: Answer) -> None:
        group, waited = answer.group, answer.group.metrics.time_to_first_token
        if not answer.started and waited is not None:
            answer.started = True
            name, cached = answer.command.request_id, group.num_cached_tokens
            reads = [each.metrics for each in (group, answer.read_ahead) if each is not None]
            num_disk, seconds = sum(each.num_disk_tokens for each in reads), sum(each.disk_seconds for each in reads)
            disk = min(cached, num_disk), seconds  # blocks that were read ahead may have been evicted
            self.send(messages.Started(name, group.num_prompt_tokens, cached, waited, answer.in_reasoning, *disk))

    def send_text(self, request_id: str, index: int) -> None:
        """Send the collected text of one completion."""
        text = self._unsent.pop((request_id, index), None)
        if text is not None:
            self.send(text)

    def end_step(self, answers: Iterable[Answer]) -> None:
        """Record an engine step. Then send text, beams and the progress of prompts.

        Each kind of report is sent only if the interval since the last one has passed.
        """
        if (step := self._engine.figures.last_step) is not None and step is not self._last_step:
            self._steps.append(step)
            self._last_step = step
        now = time.monotonic()
        if self._unsent and now - self._last_text >= self._text_interval:
            self._last_text = now
            for key in list(self._unsent):
                self.send_text(*key)
        for answer in answers:
            reads = answer.group.metrics.first_token_time is None
            if (reads or answer.searches) and now - answer.sent_at >= self._interval:
                answer.sent_at = now
                if reads:
                    self._send_reading(answer, now)
                else:
                    self._send_beams(answer, self._engine.requests.output_of(answer.group))

    def _send_reading(self, answer: Answer, now: float) -> None:
        done, total = answer.group.sequences[0].num_computed, answer.group.num_prompt_tokens
        if not 0 < done < total:
            return
        since, at = answer.first_read = answer.first_read or (now, done)
        left = (now - since) / (done - at) * (total - done) if done > at else None
        self.send(messages.Reading(answer.command.request_id, done, total, left))

    def end_copies(self, answer: Answer, output: RequestOutput) -> None:
        """Send the completions that have no sequence of their own, because they are copies of another completion."""
        own = {sequence.index for sequence in answer.group.sequences}
        for each in output.outputs:
            if each.index not in own:
                count = len(each.token_ids)
                text = messages.TextDelta(output.request_id, each.index, each.text, count, num_shared=count)
                self.send(text)
                self._send_end(answer, each.index, each.finish_reason or "abort", count)

    def _send_end(self, answer: Answer, index: int, reason: FinishReason, num_tokens: int) -> None:
        name, group = answer.command.request_id, answer.group
        self.send_text(name, index)
        elapsed = time.monotonic() - (group.metrics.first_token_time or time.monotonic())
        rate = (num_tokens - 1) / elapsed if elapsed > 0 and num_tokens else 0.0
        context = group.num_prompt_tokens + num_tokens
        self.send(messages.Finished(name, index, reason, num_tokens, rate, context, num_accepted(group, index)))

    def _send_beams(self, answer: Answer, output: RequestOutput) -> None:
        self._send_start(answer)
        beams = [
            messages.BeamView(
                text=each.text,
                score=each.score or 0.0,
                logprob=each.cumulative_logprob or 0.0,
                num_tokens=len(each.token_ids),
                finished=each.finish_reason is not None,
            )
            for each in sorted(output.outputs, key=by_score)
        ]
        self.send(messages.BeamsChanged(answer.command.request_id, beams))

    def end_beams(self, answer: Answer, output: RequestOutput) -> None:
        """Send the beams of a finished beam search, then a `Finished` event for each beam."""
        self._send_beams(answer, output)
        for each in output.outputs:
            self._send_end(answer, each.index, each.finish_reason or "abort", len(each.token_ids))

    def show_cache(self, *, now: bool = False) -> None:
        """Send steps, pool changes and memory use, unless they were sent too recently.

        ``now``: send steps and pool changes at once.
        """
        moment = time.monotonic()
        if now or moment - self._last_picture >= self._interval:
            picture = self.view.changes(self._owners())
            if self._steps:
                self.send(messages.Stepped(self._steps[-_MOST_STEPS:]))
                self._steps = []
            if picture is not None:
                self.send(picture)
            if moment - self._last_memory >= _MEMORY_INTERVAL:
                self._last_memory = moment
                self.send(memory_use(self._engine))
            self._last_picture = moment


def memory_use(engine: Engine) -> messages.MemoryUse:
    """Return the current memory use of the model's device."""
    model, cache = engine.runner.model, engine.cache
    free, total, own = device_memory(model.device)
    pool = model.local.kv_bytes_per_token(model.kv_element_size) * cache.block_size * cache.num_blocks
    others = max(0, own - model.weight_bytes)
    held = min(pool, others)  # on a CPU, the pool takes no memory until it is written to
    return messages.MemoryUse(total, free, min(own, model.weight_bytes), held, others - held)


def by_score(output: CompletionOutput) -> float:
    """Return a beam's sort key. Sorting by this key puts the best beam first."""
    return -(output.score or 0.0)
