"""`LLM`: the public face, for scripts."""

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Self

from minillm import scoring, verbs
from minillm.checks import check_names
from minillm.config import EngineConfig
from minillm.engine.asynchronous import in_threads
from minillm.engine.driver import Driver
from minillm.engine.requests import Request
from minillm.errors import MinillmError
from minillm.loading.engine import load_engine
from minillm.outputs import Delta, RequestOutput
from minillm.params import Params, SamplingParams, params_list
from minillm.progress import GenerationBar, OnMessage, OnProgress, loading_bar
from minillm.text.prompts import Prompt, prompt_list
from minillm.text.tokenizer import Tokenizer
from minillm.weights.manifest import load_manifest

Message = Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]
SomeParams = Params | Sequence[Params] | None


def _refusal(index: int, prompt: Prompt, error: MinillmError) -> RequestOutput:
    """The output of a prompt that fails alone."""
    text = prompt if isinstance(prompt, str) else None
    ids = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else []
    return RequestOutput("", text, ids, outputs=[], finished=True, error=str(error))


class LLM:
    """A model that generates. All methods may be called from any thread; one of them computes at a time.

    Args:
        model: a name of ``weights.toml``, perhaps with a form (``"llama-3.1-8b:q4_k_m"``), a repository of the Hugging
            Face hub, a directory with config.json and safetensors, or a ``.gguf`` file; by default the default model.
        on_progress, on_message: told of download and loading; by default a bar shows it, on terminals and in notebooks.
        options: see `minillm.config.EngineConfig`; an unknown one is an error.

    Raises:
        MinillmError: the model cannot be found, fetched, read or held in memory.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_progress: OnProgress | None = None,
        on_message: OnMessage = lambda message: None,
        **options: Any,
    ) -> None:
        check_names(options, [field.name for field in fields(EngineConfig)], "option")
        self.config = EngineConfig(**options)
        self._name = model or load_manifest().default
        with loading_bar(on_progress) as report:
            self.engine = load_engine(model, self.config, report, on_message)
        self._driver = Driver(self.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises UsageError where it has none (``load_format="dummy"``, say)."""
        return self._driver.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, under vLLM's name."""
        return self.tokenizer

    def close(self) -> None:
        """End the model's other processes, which end with this object otherwise; nothing can be generated then."""
        with self._driver.locked() as engine:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model, cache = self.engine.runner.model, self.engine.cache
        where = f"{model.device}, {str(model.dtype).removeprefix('torch.')}"
        pool = f"{cache.num_blocks:,} blocks of {cache.block_size} tokens"
        size = f"{model.config.num_parameters / 1e6:,.0f}M parameters"
        return f"<LLM: {self._name}, {self.engine.source}, {size}, {where}, {pool}>"

    # --- generation ---------------------------------------------------------------------------------------------------

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the model's own generation_config asks for."""
        return SamplingParams(**self.engine.defaults)

    def generate(
        self,
        prompts: Prompts,
        params: SomeParams = None,
        *,
        sampling_params: SomeParams = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched; one output per prompt, in their order.

        Args:
            prompts: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of any of these.
                Text that spells the model's chat format or control tokens is ordinary text; see `token_ids`.
            params: one set for all prompts, or one for each; by default those of `default_params`. ``sampling_params``
                is vLLM's name for it.
            use_tqdm: show a progress bar; by default on terminals and in notebooks, for more than one prompt.

        A request that fails while it runs fails alone: its output carries ``error``.

        Raises:
            MinillmError: a prompt or parameter is bad; nothing has been generated then.
        """
        found = prompt_list(prompts)
        with GenerationBar(len(found), enabled=use_tqdm) as bar:
            outputs = {}
            for index, output in self.as_completed(found, params or sampling_params, raise_errors=True):
                outputs[index] = output
                bar.advance(sum(len(completion.token_ids) for completion in output.outputs))
        return [outputs[index] for index in range(len(found))]

    def as_completed(
        self, prompts: Prompts, params: SomeParams = None, *, raise_errors: bool = False
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Like `generate`, as (index of the prompt, output) in the order in which they finish.

        A prompt that is refused fails alone: its output carries ``error``. With ``raise_errors`` it raises instead,
        before anything is generated. Leaving the iterator early, or ctrl-c, aborts everything still running.
        """
        found = prompt_list(prompts)
        jobs = iter(
            [list(zip(range(len(found)), found, params_list(params, len(found), self.default_params), strict=True))]
        )

        def refuse(index: int, prompt: Prompt, error: MinillmError) -> RequestOutput:
            raise type(error)(f"prompt {index}: {error}" if len(found) > 1 else str(error)) from None

        yield from self.work_off(lambda room: next(jobs, []), refuse=refuse if raise_errors else _refusal)

    def work_off(
        self,
        take: Callable[[int], Iterable[tuple[int, Prompt, Params]]],
        *,
        refuse: Callable[[int, Prompt, MinillmError], RequestOutput] = _refusal,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Complete prompts that are handed out piece by piece, as (index, output) in the order in which they finish.

        Args:
            take: given the number of sequences there is room for, returns the next (index, prompt, parameters): as many
                as it likes, and none when there will be no more.
            refuse: makes the output of a prompt that is refused.
        """

        def make(room: int) -> Iterable[tuple[tuple[int, Prompt], Callable[[], Request]]]:
            return [
                ((index, prompt), partial(_request, self._driver, prompt, params))
                for index, prompt, params in take(room)
            ]

        for (index, _), result in self._driver.run(make, refuse=lambda key, error: refuse(*key, error)):
            if isinstance(result, RequestOutput):
                yield index, result

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SomeParams = None,
        *,
        sampling_params: SomeParams = None,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of ``{"role": …, "content": …}``, by the model's template.

        Args:
            messages: see `minillm.text.chat_template.plain_messages`.
            chat_template: a Jinja template in place of the model's own.
            add_generation_prompt, continue_final_message: see `minillm.text.chat_template.ChatTemplate.render`.
        """
        several = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], list | tuple)
        conversations: Sequence[Any] = messages if several else [messages]
        render = partial(
            self.tokenizer.apply_chat_template,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
        prompts = [render(each) for each in conversations]
        return self.generate(prompts, params or sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, params: Params | None = None, *, request_id: str = ""
    ) -> Generator[Delta, None, None]:
        """Complete one prompt, yielding the additions of each step. Leaving the iterator early aborts the request.

        Log-probabilities are in the outputs of `generate` alone. Raises MinillmError if the request fails.
        """
        [params] = params_list(params, 1, self.default_params)
        jobs = iter([[(0, partial(_request, self._driver, prompt, params, streamed=True, request_id=request_id))]])
        for _, result in self._driver.run(lambda room: next(jobs, [])):
            if isinstance(result, Delta):
                yield result
            elif result.error is not None:
                raise MinillmError(result.error)

    def astream(self, prompt: Prompt, params: Params | None = None) -> AsyncGenerator[Delta, None]:
        """`stream` for asyncio: any number of them are computed in one batch. Leaving it early aborts the request."""
        return in_threads(self.stream(prompt, params))

    def abort(self, request_id: str) -> None:
        """End a request; its completions so far are kept, with ``finish_reason`` "abort"."""
        self.engine.abort(request_id)

    # Methods that are functions of other modules.
    beam_search, score, perplexity = verbs.beam_search, scoring.score, scoring.perplexity
    cache_stats, reset_prefix_cache, explain_miss = verbs.cache_stats, verbs.reset_prefix_cache, verbs.explain_miss
    pin, unpin = verbs.pin, verbs.unpin
    branch, sample, next_logprobs = verbs.branch, verbs.sample, verbs.next_logprobs

    def token_ids(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """A prompt's ids, special tokens added to text.

        Control tokens that a text spells are ordinary text, so that no user can forge the chat format, except with
        ``parse_special``: for text that you trust.
        """
        return self._driver.token_ids(prompt, parse_special=parse_special)


def _request(driver: Driver, prompt: Prompt, params: Params, **options: Any) -> Request:
    return Request(driver.token_ids(prompt), params, prompt if isinstance(prompt, str) else None, **options)
