"""`LLM`: what scripts import."""

from __future__ import annotations

import difflib
import itertools
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from minillm.build import build_engine
from minillm.cache import CacheStats
from minillm.config import EngineConfig
from minillm.decoding.params import BeamSearchParams, Params, SamplingParams
from minillm.engine import Engine
from minillm.errors import MinillmError, UsageError
from minillm.interrupt import deferred_interrupt
from minillm.outputs import Delta, RequestOutput
from minillm.progress import OnProgress, ignore_progress
from minillm.tokenizer import Tokenizer
from minillm.weights.files import OnMessage

Prompt = str | Sequence[int]
Message = Mapping[str, str]


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
            raise UsageError("this model has no tokenizer (load_format='dummy'); give token ids instead of text")
        return self.engine.tokenizer

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None
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
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        raise_errors: bool = False,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Like `generate`, as (index of the prompt, output) in the order in which they finish.

        A prompt that is refused fails alone: its output carries ``error``. With ``raise_errors`` it raises instead,
        before anything is generated. Leaving the iterator early, or ctrl-c, aborts what is still running.
        """
        prompt_list = _prompt_list(prompts)
        all_params = _params_list(params, len(prompt_list))
        pending: dict[str, int] = {}
        refused: list[tuple[int, RequestOutput]] = []
        try:
            for index, (prompt, each) in enumerate(zip(prompt_list, all_params, strict=True)):
                request_id = f"request-{next(self._ids)}"
                try:
                    self._add(request_id, prompt, each)
                    pending[request_id] = index
                except MinillmError as error:
                    if raise_errors:
                        raise type(error)(f"prompt {index}: {error}" if len(prompt_list) > 1 else str(error)) from None
                    refused.append((index, _refusal(request_id, prompt, error)))
            yield from refused
            while pending:
                self._step()
                for request_id in [name for name in pending if name in self.engine.finished]:
                    yield pending.pop(request_id), self.engine.finished.pop(request_id)
        finally:
            self._abort_now(pending)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
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
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if many else [messages]
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

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add(self, request_id: str, prompt: Prompt, params: Params, *, streamed: bool = False) -> None:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
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
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"unknown option {name!r}; {hint}")
    return EngineConfig(**options)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_list(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    if params is None or isinstance(params, Params):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sets of sampling parameters for {count} prompts; give one, or one for each")
    return list(params)


def _refusal(request_id: str, prompt: Prompt, error: MinillmError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[] if isinstance(prompt, str) else list(prompt),
        outputs=[],
        finished=True,
        error=str(error),
    )
