"""`LLM`: what scripts import."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minillm.branch import Branch
from minillm.cache import CacheStats, PrefixReport
from minillm.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.errors import MinillmError, UsageError, nearest
from minillm.interrupt import deferred_interrupt
from minillm.load import build_engine
from minillm.outputs import CompletionOutput, Delta, RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.progress import OnProgress, ignore_progress
from minillm.sequence import Sequence as TokenSequence
from minillm.text.prompts import Prompt, plain_ids, prompt_list
from minillm.text.tokenizer import Tokenizer
from minillm.weights.files import OnMessage

Message = Mapping[str, str]


@dataclass(frozen=True)
class PinnedPrefix:
    """What `LLM.pin` keeps: for `LLM.unpin`."""

    token_ids: list[int]
    sequence: TokenSequence


class LLM:
    """A model that generates.

    Args:
        model: a name of ``weights.toml``, a directory with config.json and safetensors, or a ``.gguf`` file.
        on_progress, on_message: told how far download and loading have come, and what served the weights.
        options: see `minillm.config.EngineConfig`; an unknown one is an error.

    Raises:
        MinillmError: the model cannot be found, fetched, read or held in memory.

    All methods may be called from any thread; one of them computes at a time.
    """

    def __init__(
        self,
        model: str,
        *,
        on_progress: OnProgress = ignore_progress,
        on_message: OnMessage = lambda message: None,
        **options: Any,
    ) -> None:
        self.config = _engine_config(options)
        self.engine: Engine = build_engine(model, self.config, on_progress, on_message)
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._streams: dict[str, deque[Delta]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UsageError: the model has none (``load_format="dummy"``).
        """
        if self.engine.tokenizer is None:
            raise UsageError(
                "this model has no tokenizer (no tokenizer.json, or random weights); give token ids instead of text"
            )
        return self.engine.tokenizer

    def close(self) -> None:
        """End the other processes of a model that several share; nothing can be generated after that.

        Without it they end with this object, or with this process.
        """
        with self._lock:
            self.engine.runner.close()

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | Sequence[Params] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched; one output per prompt, in their order.

        Args:
            prompts: text, or token ids, or a list of either.
            params: one set for all prompts, or one for each.

        Raises:
            MinillmError: a prompt or parameter is bad; nothing has been generated then.
        """
        outputs = dict(self.as_completed(prompts, params, raise_errors=True))
        return [outputs[index] for index in sorted(outputs)]

    def as_completed(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        raise_errors: bool = False,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Like `generate`, as (index of the prompt, output) in the order in which they finish.

        A prompt that is refused fails alone: its output carries ``error``. With ``raise_errors`` it raises instead,
        before anything is generated. Leaving the iterator early, or ctrl-c, aborts what is still running.
        """
        found = prompt_list(prompts)
        all_params = _params_list(params, len(found))
        pending: dict[str, int] = {}
        refused: list[tuple[int, RequestOutput]] = []
        try:
            for index, (prompt, each) in enumerate(zip(found, all_params, strict=True)):
                request_id = f"request-{next(self._ids)}"
                try:
                    self._add(request_id, prompt, each)
                    pending[request_id] = index
                except MinillmError as error:
                    if raise_errors:
                        raise type(error)(f"prompt {index}: {error}" if len(found) > 1 else str(error)) from None
                    refused.append((index, _refusal(request_id, prompt, error)))
            yield from refused
            while pending:
                self._step()
                for request_id in [name for name in pending if name in self.engine.finished]:
                    yield pending.pop(request_id), self.engine.finished.pop(request_id)
        finally:
            self._abort_now(pending)

    def work_off(
        self, take: Callable[[int], Sequence[tuple[int, Prompt, Params]]]
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Complete prompts that somebody else hands out, as (index, output) in the order in which they finish.

        Args:
            take: given how many sequences there is room for, the next (index, prompt, parameters): as many as it likes,
                and none when there will be no more. It is asked whenever no request waits for its turn.
        """
        pending: dict[str, int] = {}
        more = True
        try:
            while more or pending:
                scheduler = self.engine.scheduler
                room = scheduler.max_num_seqs - sum(group.num_seqs for group in scheduler.running)
                if more and room > 0 and not scheduler.waiting:
                    taken = take(room)
                    more = bool(taken)
                    for index, prompt, params in taken:
                        request_id = f"request-{next(self._ids)}"
                        try:
                            self._add(request_id, prompt, params)
                            pending[request_id] = index
                        except MinillmError as error:
                            yield index, _refusal(request_id, prompt, error)
                if not pending:
                    continue
                self._step()
                for request_id in [name for name in pending if name in self.engine.finished]:
                    yield pending.pop(request_id), self.engine.finished.pop(request_id)
        finally:
            self._abort_now(pending)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams | None = None
    ) -> list[RequestOutput]:
        """Complete prompts by beam search; each output's completions are its best beams, the best first.

        `generate` takes BeamSearchParams as well, and mixes them with sampling in one batch.
        """
        return self.generate(prompts, params or BeamSearchParams())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of ``{"role": …, "content": …}``, by the model's template."""
        several = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], list | tuple)
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate([self.tokenizer.apply_chat_template(each) for each in conversations], params)

    def stream(
        self, prompt: Prompt, params: Params | None = None, *, request_id: str | None = None
    ) -> Generator[Delta, None, None]:
        """Complete one prompt, yielding what each step adds. Leaving the iterator early aborts the request."""
        request_id = request_id or f"stream-{next(self._ids)}"
        self._add(request_id, prompt, params or SamplingParams(), streamed=True)
        deltas = self._streams[request_id] = deque()
        try:
            while request_id in self.engine.groups or deltas:
                if not deltas:
                    self._step()
                while deltas:
                    yield deltas.popleft()
        finally:
            del self._streams[request_id]
            self._abort_now([request_id])

    def abort(self, request_id: str) -> None:
        """End a request; what it has generated so far is kept, with ``finish_reason`` "abort"."""
        self.engine.abort(request_id)

    def cache_stats(self) -> CacheStats:
        """Token-true memory figures of the pool, now."""
        with self._lock:
            return self.engine.cache_stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what runs now is not disturbed."""
        with self._lock:
            self.engine.cache.reset_prefix_cache()

    def explain_miss(self, prompt: Prompt, *, salt: str | None = None) -> PrefixReport:
        """How many tokens of a prompt would be found in the prefix cache, and which token differs first."""
        with self._lock:
            return self.engine.cache.explain_miss(self.token_ids(prompt), salt)

    def pin(self, prompt: Prompt, *, salt: str | None = None) -> PinnedPrefix:
        """Compute a prefix, a system prompt say, and keep its blocks under any load until it is unpinned.

        Raises:
            CapacityError: more than half of the pool would be pinned.
        """
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        sequence = self._hold([(self.token_ids(prompt), None)], [params], salt=salt)[0][0]
        with self._lock:
            try:
                self.engine.pin(sequence)
            except MinillmError:
                self.engine.release(sequence)
                raise
        return PinnedPrefix(sequence.token_ids[:-1], sequence)

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Let a pinned prefix go; it stays in the prefix cache until its blocks are needed."""
        with self._lock:
            self.engine.unpin(prefix.sequence)

    # --- branches -----------------------------------------------------------------------------------------------------

    def branch(self, prompt: Prompt) -> Branch:
        """A branch that begins with ``prompt``; see `minillm.branch.Branch`."""
        token_ids = self.token_ids(prompt)
        self.engine.check_prompt(token_ids)
        return Branch(self, token_ids)

    def sample(
        self, branches: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[CompletionOutput]:
        """Go on with several branches in one batch; each grows by its completion.

        Args:
            params: one set for all branches, or one for each; ``n`` must be 1 (fork first).
        """
        each = [p for p in _params_list(params, len(branches)) if isinstance(p, SamplingParams)]
        if len(each) != len(branches) or any(p.n != 1 for p in each):
            raise UsageError("a branch goes on with one completion: SamplingParams with n=1; fork it to have several")
        completions = []
        for branch, (sequence, output) in zip(branches, self._go_on(branches, each), strict=True):
            completion = output.outputs[0]
            end = completion.token_ids[-1:] if completion.finish_reason == "stop" else []
            if end and (end[0] in self.engine.eos_token_ids or end[0] == completion.stop_reason):
                sequence.token_ids.pop()  # it was never computed: its place is free
            branch.sequence, branch.token_ids = sequence, list(sequence.token_ids)
            completions.append(completion)
        return completions

    def next_logprobs(self, branches: Sequence[Branch], count: int = 20) -> list[list[tuple[int, float]]]:
        """The ``count`` most probable next tokens of each branch, in one batch; the branches stay as they are."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=count)
        result = []
        for branch, (sequence, output) in zip(branches, self._go_on(branches, [params] * len(branches)), strict=True):
            sequence.token_ids.pop()
            branch.sequence = sequence
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            result.append(list(logprobs[0].top))
        return result

    def fork_idle(
        self, sequence: TokenSequence, num_tokens: int | None = None, *, replace: bool = False
    ) -> TokenSequence:
        """For branches: share an idle sequence's beginning; with ``replace`` the original is freed."""
        with self._lock:
            child = self.engine.fork_idle(sequence, num_tokens)
            if replace:
                self.engine.release(sequence)
            return child

    def release(self, sequence: TokenSequence) -> None:
        """For branches: free an idle sequence."""
        with self._lock:
            self.engine.release(sequence)

    def _go_on(
        self, branches: Sequence[Branch], params: Sequence[SamplingParams]
    ) -> list[tuple[TokenSequence, RequestOutput]]:
        for branch in branches:
            branch.check()
        if len({id(branch) for branch in branches}) != len(branches):
            raise UsageError("the same branch twice in one batch; fork it")
        results = self._hold([(branch.token_ids, branch.sequence) for branch in branches], params)
        for branch in branches:
            if branch.sequence is not None:
                self.release(branch.sequence)
        return results

    def _hold(
        self,
        starts: Sequence[tuple[list[int], TokenSequence | None]],
        params: Sequence[SamplingParams],
        *,
        salt: str | None = None,
    ) -> list[tuple[TokenSequence, RequestOutput]]:
        """Run requests whose blocks stay: each start's tokens, and the idle sequence that has computed some of them."""
        names: list[str] = []
        sequences = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for (token_ids, parent), each in zip(starts, params, strict=True):
                name = f"branch-{next(self._ids)}"
                with self._lock:
                    group = self.engine.add_request(name, token_ids, each, parent=parent, hold=True, salt=salt)
                names.append(name)
                sequences.append(group.sequences[0])
            while len(outputs) < len(names):
                self._step()
                for name in names:
                    if name in self.engine.finished:
                        outputs[name] = self.engine.finished.pop(name)
            failed = next((output.error for output in outputs.values() if output.error is not None), None)
            if failed is not None:
                raise MinillmError(failed)
        except BaseException:
            self._abort_now([name for name in names if name not in outputs])
            for sequence in sequences:
                self.release(sequence)
            raise
        return [(sequence, outputs[name]) for sequence, name in zip(sequences, names, strict=True)]

    def token_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """A prompt's ids; only text needs a tokenizer, and has special tokens added.

        Raises:
            UsageError: it is no prompt, or text for a model without a tokenizer.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return plain_ids(prompt)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add(self, request_id: str, prompt: Prompt, params: Params, *, streamed: bool = False) -> None:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.token_ids(prompt)
        with self._lock:
            self.engine.add_request(request_id, token_ids, params, prompt=text, streamed=streamed)

    def _step(self) -> None:
        with self._lock, deferred_interrupt():
            for delta in self.engine.step():
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.append(delta)

    def _abort_now(self, request_ids: Sequence[str] | Mapping[str, int]) -> None:
        """Abort requests and wait until their blocks are back, without computing anything."""
        with self._lock:
            for request_id in request_ids:
                self.engine.abort(request_id)
            self.engine.carry_out_aborts()
            for request_id in request_ids:
                self.engine.finished.pop(request_id, None)


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"unknown option {name!r}; {hint}")
    return EngineConfig(**options)


def _params_list(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    if params is None or isinstance(params, Params):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, Params) for each in params):
        raise UsageError("sampling parameters are a SamplingParams or BeamSearchParams, or a list of them")
    if len(params) != count:
        raise UsageError(f"{len(params)} sets of sampling parameters for {count} prompts; give one, or one for each")
    return list(params)


def _refusal(request_id: str, prompt: Prompt, error: MinillmError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else [],
        outputs=[],
        finished=True,
        error=str(error),
    )
