"""The HTTP process's requests on one engine. This module runs in the engine thread."""

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from minillm.checks import shown
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.prompts import tokenizer_of
from minillm.engine.requests import Request
from minillm.errors import MinillmError, UsageError
from minillm.outputs import CompletionOutput, Delta, RequestOutput, TokenLogprobs, finite
from minillm.parallel.channel import RankDied
from minillm.params import BeamSearchParams
from minillm.sequence import Sequence, SequenceGroup
from minillm.service import call_messages as messages
from minillm.service.cache_view import CacheView, Owner
from minillm.service.messages import RequestFailed, TableState
from minillm.service.prefixes import Prefixes
from minillm.service.prepare import Prepared, token_of
from minillm.text.reasoning import is_opened, is_unfinished

_MOST_FORKABLE = 2_000  # maximum number of ended answers that can be forked; older answers are forgotten
_MOST_FORKABLE_TOKENS = 1_000_000
_MOST_KEPT = 256  # maximum number of ended answers with blocks that stay in the pool
_FIGURES_INTERVAL = 0.5  # seconds


@dataclass(slots=True)
class RunningRequest:
    """A running request."""

    prepared: Prepared
    group: SequenceGroup
    token_ids: list[int]  # the prompt's ids
    has_begun: bool = False  # `Began` was sent or is not needed
    wants_ids: bool = False
    is_plain: bool = False  # only text is streamed; a separate branch for this saves 0.1 ms per step of a large batch
    is_timed: bool = False  # the time to first token was sent with a text


@dataclass(slots=True)
class ForkableAnswer:
    """An ended answer that can be forked, even if its blocks are no longer in the pool."""

    tenant: str
    prompt_ids: list[int]
    output_ids: list[list[int]]  # by completion
    salt: str | None
    in_reasoning: bool  # the prompt ends inside the reasoning
    sequences: list[Sequence]  # idle sequences with blocks that stay in the pool


@dataclass
class EngineRequests:
    """Runs an engine for the clients of the HTTP process. All methods must be called in one thread.

    A *reader* is the tenant for whom cache changes are collected. Only this tenant's text may be shown. Without a
    reader, all text may be shown.

    Attributes:
        send: sends an event to the HTTP process.
        others: called with a reader, or with None. Returns the owner of each sequence of a chat session, by seq_id.
    """

    driver: Driver
    send: Callable[[messages.AnyEvent], None]
    others: Callable[[str | None], dict[int, Owner]] = lambda reader: {}
    running: dict[str, RunningRequest] = field(default_factory=dict)
    forkable: OrderedDict[str, ForkableAnswer] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.engine = self.driver.engine
        self.prefixes = Prefixes(self.driver, self.send)
        self.preparing: set[str] = set()  # requests that are being prepared; other threads add to this set
        self._gone: set[str] = set()  # requests that were aborted while they were prepared
        self._num_forkable_tokens = 0
        self._step_at = 0.0  # start time of the current step; 0 between steps
        self._figures_at = 0.0
        self._num_prefilled = self._num_decoded = 0
        self._last_figures: messages.Figures | None = None
        self._last_step = self.engine.figures.last_step

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, prepared: Prepared) -> None:
        """Queue a prepared request in the engine. If the engine rejects the request, send the error."""
        call = prepared.call
        if not self._arrives(call.request_id):
            return
        with self._refusing(call.request_id):
            token_ids, parent, salt = prepared.token_ids, None, call.salt
            if call.fork is not None:
                before, parent, salt, in_reasoning = self._forked(call)
                prepared = replace(prepared, in_reasoning=in_reasoning and not call.is_bare)
                if prepared.continuation is not None and tokenizer_of(self.engine).ends_in_text(before):
                    token_ids = prepared.continuation
                token_ids = before + token_ids
            if not token_ids:
                raise UsageError("the prompt is empty; give at least one token")
            params = prepared.params
            if "max_tokens" not in call.params:
                fitting = self.engine.scheduler.idle.tokens_that_fit(len(token_ids), params.num_sequences)
                most = min(fitting, self.engine.max_model_len - len(token_ids))
                params = replace(params, max_tokens=max(params.min_tokens, 1, most))
            request = Request(
                token_ids, params, parent=parent, hold=call.keep, salt=salt, request_id=call.request_id,
                in_reasoning=prepared.in_reasoning,
            )  # fmt: skip
            group = self.engine.add(request)
            searches = isinstance(params, BeamSearchParams)
            is_plain = call.streamed and not (call.echo or searches or params.logprobs is not None)
            running = self.running[call.request_id] = RunningRequest(
                prepared, group, token_ids, not call.echo, call.wants_ids, is_plain
            )
            if prepared.in_reasoning or call.streamed or call.wants_ids:
                self.send(self._began(running, "", []))

    @contextmanager
    def _refusing(self, request_id: str) -> Iterator[None]:
        try:
            yield
        except MinillmError as error:
            self.send(RequestFailed(request_id, str(error), messages.kind_of(error)))
        except Exception as error:  # a bug ends one request, not all
            sys.stderr.write(f"request failed: {type(error).__name__}: {error}\n")
            self.send(RequestFailed(request_id, "internal error; see the server's log", "internal"))

    def _forked(self, call: messages.Complete) -> tuple[list[int], Sequence | None, str | None, bool]:
        """Return the data of the fork that ``call`` asks for. Raises UsageError if the fork point does not exist.

        Returns:
            - the tokens before the fork;
            - a sequence in the pool that begins with these tokens, or None;
            - the salt of these tokens' blocks in the prefix cache;
            - whether these tokens end inside the reasoning.
        """
        fork = call.fork
        assert fork is not None
        answer = self.forkable.get(fork.request_id)
        if answer is None or answer.tenant != call.tenant:
            name = f"{fork.request_id}-0"
            first = self.forkable.get(name)
            if first is not None and first.tenant == call.tenant:
                raise UsageError(
                    f"fork_of: the request had several prompts; {shown(name)} is the answer to the first one"
                )
            known = f"the latest {_MOST_FORKABLE} answers can be forked"
            raise UsageError(f"fork_of: unknown answer {shown(fork.request_id)}; {known}")
        if not 0 <= fork.index < len(answer.output_ids):
            raise UsageError(f"fork_of: no completion {fork.index}; the answer has {len(answer.output_ids)}")
        output = answer.output_ids[fork.index]
        count = len(output) if fork.num_tokens is None else fork.num_tokens
        if not 0 <= count <= len(output):
            raise UsageError(f"fork_of: num_tokens is {count}, but the completion has {len(output)} tokens")
        self.forkable.move_to_end(fork.request_id)
        kept = [each for each in answer.sequences if each.table is not None]
        before = answer.prompt_ids + output[:count]
        parent = next((each for each in kept if each.token_ids[: len(before)] == before), None)
        text = "" if self.engine.tokenizer is None else self.engine.tokenizer.decode(output[:count])
        in_reasoning = is_unfinished(text, inside=answer.in_reasoning)
        return before, parent, answer.salt if call.salt is None else call.salt, in_reasoning

    def abort(self, request_id: str) -> None:
        """Abort a request, whether it is running or still being prepared. An unknown request is ignored."""
        if request_id in self.running:
            self.engine.abort(request_id)
        elif request_id in self.preparing:
            self._gone.add(request_id)

    def refuse(self, request_id: str, error: MinillmError) -> None:
        """Send the error of a request that could not be prepared."""
        if self._arrives(request_id):
            with self._refusing(request_id):
                raise error

    def _arrives(self, request_id: str) -> bool:
        """Record that a request has been prepared. Return False if the request was aborted in the meantime."""
        self.preparing.discard(request_id)
        gone = request_id in self._gone
        self._gone.discard(request_id)
        return not gone

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """Return for how long the current step has run, in seconds; 0 between steps. Any thread may call this."""
        began = self._step_at
        return time.monotonic() - began if began else 0.0

    def step(self) -> tuple[list[Delta], list[RequestOutput]]:
        """Run one engine step and send the results of HTTP clients' requests.

        Return the results of all other requests: their new texts, and the requests that have ended. Raise the engine's
        exception if another rank has died, or if no request has ended: the next step would fail in the same way.
        """
        engine = self.engine
        num_groups = len(engine.requests.groups)
        self._step_at = time.monotonic()
        try:
            deltas = engine.step()
        except Exception as error:  # the engine has freed the step's blocks
            sys.stderr.write(f"step failed: {type(error).__name__}: {error}\n")
            if isinstance(error, RankDied) or len(engine.requests.groups) == num_groups:
                raise
            deltas = engine.take_undelivered()
        finally:
            self._step_at = 0.0
        step = engine.figures.last_step
        if step is not None and step is not self._last_step:
            self._last_step = step
            self._num_prefilled += step.num_prefill_tokens
            self._num_decoded += step.num_decodes
        texts, strange = [], []
        for delta in deltas:
            name = delta.request_id
            running = self.running.get(name)
            if running is None:
                strange.append(delta)
                continue
            if running.is_plain:
                count, ids = len(delta.token_ids), delta.token_ids if running.wants_ids else []
                ends = (delta.finish_reason, delta.stop_reason)
                texts.append(messages.Text(name, delta.index, delta.text, count, [], *ends, ids))
            elif running.prepared.call.streamed and not delta.replaces:
                self._begin(running)
                texts.append(self._text(running, delta))
            else:
                continue
            if not running.is_timed:
                running.is_timed = True
                texts[-1].first_seconds = running.group.metrics.time_to_first_token or 0.0
        if texts:
            self.send(messages.Texts(texts))
        outputs = []
        for name in list(engine.requests.finished):
            group = engine.requests.finished[name]
            output = engine.requests.take(name)
            if name in self.running:
                self._end(self.running.pop(name), output)
            elif not self.prefixes.take(name, group):
                outputs.append(output)
        return strange, outputs

    def _begin(self, running: RunningRequest) -> None:
        """Send `Began` with the text and tokens of the prompt.

        Do nothing if the event was sent before, or if the client does not need it.
        """
        if running.has_begun:
            return
        running.has_begun = True
        tokenizer, scores = self.engine.tokenizer, running.group.scores
        text = "" if tokenizer is None else tokenizer.decode(running.token_ids)
        tokens = []
        if scores is not None:
            tokens = [token_of(tokenizer, running.token_ids[0], None, [])]
            tokens += [self._token(each, each.rank) for each in scores.tokens if each is not None]
        self.send(self._began(running, text, tokens))

    def _began(self, running: RunningRequest, text: str, tokens: list[messages.Token]) -> messages.Began:
        """Return the event `Began`. ``text`` and ``tokens`` are those of the prompt, if the client needs them."""
        prepared, ids = running.prepared, running.token_ids
        has_reasoned = prepared.in_reasoning and not is_opened(tokenizer_of(self.engine).decode, ids)
        return messages.Began(
            prepared.call.request_id, text, tokens, prepared.in_reasoning, len(ids),
            ids if running.wants_ids else [], has_reasoned,
        )  # fmt: skip

    def _text(self, running: RunningRequest, delta: Delta) -> messages.Text:
        tokens: list[messages.Token] = []
        if running.group.params.logprobs is not None and delta.token_ids:
            sequence = next(each for each in running.group.sequences if each.index == delta.index)
            first = sequence.num_output_tokens - len(delta.token_ids)
            tokens = [self._token(each) for each in sequence.logprobs[first : first + len(delta.token_ids)]]
        ids = delta.token_ids if running.prepared.call.wants_ids else []
        count, reasons = len(delta.token_ids), (delta.finish_reason, delta.stop_reason)
        return messages.Text(delta.request_id, delta.index, delta.text, count, tokens, *reasons, ids)

    def _token(self, each: TokenLogprobs, rank: int = 0) -> messages.Token:
        top = [(other, finite(value)) for other, value in each.top]
        return token_of(self.engine.tokenizer, each.token_id, finite(each.logprob), top, rank)

    def _end(self, running: RunningRequest, output: RequestOutput) -> None:
        call, group = running.prepared.call, running.group
        if call.ranked:
            output = replace(output, outputs=sorted(output.outputs, key=_mean_logprob, reverse=True))
        self._keep_forkable(running, output)
        if group.error is not None:
            kind = "usage" if group.error.is_usage else "internal"
            self.send(RequestFailed(call.request_id, group.error.text, kind))
            return
        self._begin(running)
        wanted = not call.streamed or isinstance(group.params, BeamSearchParams)
        self.send(
            messages.Ended(
                call.request_id,
                len(running.token_ids),
                output.num_cached_tokens,
                [self._completion(each, call.wants_ids) for each in output.outputs] if wanted else [],
                sum(each.reasoning_tokens for each in output.outputs),
            )
        )

    def _completion(self, each: CompletionOutput, wants_ids: bool) -> messages.Completion:
        return messages.Completion(
            each.index,
            each.text,
            len(each.token_ids),
            [self._token(token) for token in each.logprobs or ()],
            each.finish_reason or "abort",
            each.stop_reason,
            None if each.cumulative_logprob is None else finite(each.cumulative_logprob),
            None if each.score is None else finite(each.score),
            each.token_ids if wants_ids else [],
        )

    # --- answers that can be forked -----------------------------------------------------------------------------------

    def _keep_forkable(self, running: RunningRequest, output: RequestOutput) -> None:
        call, sequences = running.prepared.call, [each for each in running.group.sequences if each.table is not None]
        if output.error is not None or any(each.finish_reason == "abort" for each in output.outputs):
            self._release(sequences)
            return
        ids = [each.token_ids for each in output.outputs]
        self.forkable[call.request_id] = ForkableAnswer(
            call.tenant, running.token_ids, ids, running.group.salt, running.prepared.in_reasoning, sequences
        )
        self._num_forkable_tokens += len(running.token_ids) + sum(map(len, ids))
        while len(self.forkable) > _MOST_FORKABLE or self._num_forkable_tokens > _MOST_FORKABLE_TOKENS:
            _, old = self.forkable.popitem(last=False)
            self._num_forkable_tokens -= len(old.prompt_ids) + sum(map(len, old.output_ids))
            self._release(old.sequences)
        kept = [each for each in self.forkable.values() if each.sequences]
        for old in kept[: max(0, len(kept) - _MOST_KEPT)]:
            self._release(old.sequences)
            old.sequences = []

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            idle_sequences.release(self.driver, sequence)

    # --- the pool -----------------------------------------------------------------------------------------------------

    def owners(self, reader: str | None = None) -> dict[int, Owner]:
        """Return the owner of every sequence, by seq_id.

        An owner also says whether ``reader`` may see the sequence's text.
        """
        found = self.others(reader)

        def add(name: str, tenant: str, state: TableState, sequences: list[Sequence]) -> None:
            shows = reader in (None, tenant)
            found.update((each.seq_id, Owner(name, each.index, state, each, shows)) for each in sequences)

        for name, answer in self.forkable.items():
            add(name, answer.tenant, "idle", answer.sequences)
        for name, running in self.running.items():
            add(name, running.prepared.call.tenant, "running", running.group.sequences)
        for name, pin in self.prefixes.pinned.items():
            add(name, pin.tenant, "running" if pin.sequence is None else "pinned", pin.group.sequences)
        return found

    def read_cache(self, call: messages.ReadCache) -> None:
        """Send the current figures of the cache, and all block tables."""
        view = CacheView(self.engine)
        changed = view.changes(self.owners())
        view.close()
        names = ("seq_id", "request", "index", "state", "num_tokens", "blocks")
        tables = [] if changed is None else changed.tables
        values = [(t.seq_id, t.owner, t.index, t.state, t.num_tokens, t.blocks) for t in tables]
        rows = [dict(zip(names, each, strict=True)) for each in values]
        cached = [] if changed is None else sorted(changed.cached)
        figures = asdict(self.engine.figures.cache_stats())
        self.send(messages.Result(call.call_id, {"figures": figures, "tables": rows, "cached_blocks": cached}))

    def report(self, *, now: bool = False) -> None:
        """Send the figures that have changed, unless figures were sent too recently.

        ``now``: send changed figures at once, even if others were sent recently.
        """
        moment = time.monotonic()
        if now or moment - self._figures_at >= _FIGURES_INTERVAL:
            self._figures_at = moment
            figures = self._figures()
            if figures != self._last_figures:
                self._last_figures = figures
                self.send(figures)

    def _figures(self) -> messages.Figures:
        scheduler, cache = self.engine.scheduler, self.engine.cache
        free, disk = cache.num_free, {} if self.engine.requests.disk is None else self.engine.requests.disk.figures()
        return messages.Figures(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_steps=self.engine.figures.num_steps,
            num_prefill_tokens=self._num_prefilled,
            num_decoded_tokens=self._num_decoded,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            used_blocks=cache.num_blocks - free,
            cached_blocks=cache.num_cached,
            num_preemptions=scheduler.preemption.count,
            num_hit_tokens=cache.num_hit_tokens,
            num_looked_up_tokens=cache.num_looked_up_tokens,
            num_copies=cache.num_copies,
            disk_bytes=disk.get("disk_bytes", 0),
            num_disk_saved=disk.get("num_disk_saved", 0),
            num_disk_read=disk.get("num_disk_read", 0),
        )


def _mean_logprob(output: CompletionOutput) -> float:
    """Return the mean log-probability of a completion's tokens."""
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
