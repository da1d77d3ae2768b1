"""`LLM`: the Python API."""

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, Self, TypeVar

from minillm import depths as reasoning_depths
from minillm import llm_methods as methods
from minillm import scoring
from minillm.checks import check_names, shown
from minillm.config import EngineConfig
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.engine.prompts import token_ids_of, tokenizer_of
from minillm.engine.requests import Request
from minillm.errors import MinillmError, UsageError
from minillm.llm_methods import Prompts, SomeParams
from minillm.loading.engine import load_engine
from minillm.outputs import RequestOutput
from minillm.params import Params, SamplingParams, params_list
from minillm.progress import GenerationBar, OnMessage, OnProgress, loading_bar
from minillm.text.prompts import Prompt, prompt_list
from minillm.text.tokenizer import Tokenizer
from minillm.weights.manifest import load_manifest

Key = TypeVar("Key")


class LLM:
    """A language model. All methods may be called from any thread; one thread computes at a time.

    Args:
        model: a name from ``weights.toml``, optionally with a quantization (``"llama-3.1-8b:q4_k_m"``), a Hugging Face
            repository, a directory with config.json and safetensors, or a ``.gguf`` file. None: the default model.
        on_progress, on_message: called during download and loading. By default a bar is shown on terminals and in
            notebooks.
        options: the options of `minillm.config.EngineConfig`.

    Raises:
        MinillmError: an option is wrong, or the model cannot be found, downloaded, read or held in memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
        on_message: OnMessage = lambda message: None,
        **options: Any,
    ) -> None:
        check_names(options, [field.name for field in fields(EngineConfig)], "option")
        self.config = EngineConfig(**options)
        if not isinstance(model, str | os.PathLike | None):
            raise UsageError(f"a model is a name or a path, not {shown(model)}")
        name = None if model is None else os.fspath(model)
        self.name = name or load_manifest().default
        with loading_bar(on_progress) as report:
            self.engine = load_engine(name, self.config, report, on_message)
        self._driver = Driver(self.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises UsageError without one, for example with ``load_format="dummy"``."""
        return tokenizer_of(self.engine)

    def close(self) -> None:
        """End the processes of the model's other ranks. This object cannot generate afterwards.

        Without this call the processes end when this object is deleted.
        """
        with self._driver.locked() as engine:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # --- generation ---------------------------------------------------------------------------------------------------

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's own generation_config."""
        return self.engine.default_params()

    def generate(
        self,
        prompts: Prompts,
        params: SomeParams = None,
        *,
        sampling_params: SomeParams = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many in a batch. Return one output per prompt, in order.

        If a request fails while it runs, only its output has ``error`` set; the others are complete.

        Args:
            prompts: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of any of these.
                Text that spells the model's chat format or control tokens is ordinary text; see `token_ids`.
            params: one set of parameters for all prompts, or a list with one for each prompt. By default,
                `default_params`. ``sampling_params`` is vLLM's name for this argument.
            use_tqdm: show a progress bar. By default, on terminals and in notebooks if there are several prompts.

        Raises:
            MinillmError: a prompt or parameter is invalid; nothing has been generated.
        """
        found = prompt_list(prompts)
        params = sampling_params if params is None else params
        with GenerationBar(len(found), enabled=use_tqdm) as bar:
            outputs = {}
            for index, output in self.as_completed(found, params, raise_errors=True):
                outputs[index] = output
                bar.advance(sum(len(completion.token_ids) for completion in output.outputs))
        return [outputs[index] for index in range(len(found))]

    def as_completed(
        self, prompts: Prompts, params: SomeParams = None, *, raise_errors: bool = False
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Complete prompts like `generate`. Yield (index of the prompt, output) as prompts finish.

        The output of a rejected prompt has ``error`` set, and the others are complete. With ``raise_errors``, a
        rejected prompt raises instead, before anything is generated. Leaving the iterator early, or ctrl-c, aborts
        everything that is still running.
        """
        found = prompt_list(prompts)
        each = zip(range(len(found)), found, params_list(params, len(found), self.default_params), strict=True)
        jobs = iter([[((index, prompt), partial(_pair, prompt, params)) for index, prompt, params in each]])

        def refuse(key: tuple[int, Prompt], error: MinillmError) -> RequestOutput:
            if not raise_errors:
                return methods.refusal(key[1], error)
            raise type(error)(f"prompt {key[0]}: {error}" if len(found) > 1 else str(error)) from None

        for (index, _), output in self.work_off(lambda num_free_seqs: next(jobs, []), refuse):
            yield index, output

    def work_off(
        self,
        take: Callable[[int], Iterable[tuple[Key, Callable[[], tuple[Prompt, Params]]]] | None],
        refuse: Callable[[Key, MinillmError], RequestOutput],
    ) -> Generator[tuple[Key, RequestOutput], None, None]:
        """Complete prompts that the caller supplies over time. Yield (key, output) as prompts finish.

        Args:
            take: called with the number of sequences that could start. Returns any number of (key, function that
                returns prompt and parameters) pairs. An empty result ends the input. None means that no prompt is ready
                yet. `take` may block if all earlier prompts are done.
            refuse: returns the output of a rejected prompt.
        """

        def requests(num_free_seqs: int) -> Iterable[tuple[Key, Callable[[], Request]]] | None:
            taken = take(num_free_seqs)
            return None if taken is None else [(key, partial(_request_of, self.engine, make)) for key, make in taken]

        for key, result in self._driver.run(requests, refuse=refuse):
            if isinstance(result, RequestOutput):
                yield key, result

    def abort(self, request_id: str) -> None:
        """End a running request. Its output keeps the tokens so far, with ``finish_reason`` "abort"."""
        self.engine.abort(request_id)

    # Methods that are functions of other modules.
    __repr__, chat, get_tokenizer = methods.describe, methods.chat, methods.get_tokenizer
    stream, astream = methods.stream, methods.astream
    beam_search, score, perplexity = methods.beam_search, scoring.score, scoring.perplexity
    cache_stats, reset_prefix_cache = methods.cache_stats, methods.reset_prefix_cache
    explain_miss = methods.explain_miss
    pin, unpin = methods.pin, methods.unpin
    depths = reasoning_depths.depths
    branch, sample, next_logprobs = methods.branch, methods.sample, methods.next_logprobs

    def token_ids(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Return a prompt's token ids. Special tokens, such as a begin-of-sequence token, are added to text.

        Control tokens that a text spells are ordinary text, so that no user can forge the chat format. For text that
        you trust, ``parse_special`` turns them into control tokens.
        """
        return token_ids_of(self.engine, prompt, parse_special=parse_special)


def _request_of(engine: Engine, make: Callable[[], tuple[Prompt, Params]]) -> Request:
    return methods.request_of(engine, *make(), offline=True)


def _pair(prompt: Prompt, params: Params) -> tuple[Prompt, Params]:
    return prompt, params
