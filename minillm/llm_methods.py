"""Methods of `minillm.llm.LLM` as functions: chat, beam search, branches, pinned prefixes, the cache."""

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from minillm import branch as branches
from minillm.branch import Branch
from minillm.cache import CacheStats, PrefixReport
from minillm.cache import explain_miss as explain_cache_miss
from minillm.engine import idle_sequences
from minillm.engine.asynchronous import in_threads
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.engine.prompts import token_ids_of
from minillm.engine.request_fields import salt_for
from minillm.engine.requests import Request
from minillm.errors import MinillmError, UsageError
from minillm.outputs import CompletionOutput, Delta, RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams, params_list
from minillm.sequence import Sequence as TokenSequence
from minillm.text.prompts import Prompt
from minillm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]
SomeParams = Params | Sequence[Params] | None


class LLMInterface(Protocol):
    """The part of the LLM class that the functions of this module use."""

    name: str
    _driver: Driver

    @property
    def tokenizer(self) -> Tokenizer:
        """See `LLM.tokenizer`."""

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters for calls without parameters."""

    def generate(
        self, prompts: Prompts, params: SomeParams = None, *, use_tqdm: bool | None = None
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""


@dataclass(frozen=True)
class PinnedPrefix:
    """The result of `LLM.pin`: a pinned prefix, to pass to `LLM.unpin`."""

    token_ids: list[int]
    sequence: TokenSequence = field(repr=False)
    driver: Driver = field(repr=False)


def beam_search(llm: LLMInterface, prompts: Prompts, params: BeamSearchParams | None = None) -> list[RequestOutput]:
    """Run `generate` with beam search. Each output has the prompt's best beams as completions, best first."""
    if any(isinstance(each, SamplingParams) for each in (params if isinstance(params, Sequence) else [params])):
        raise UsageError("a beam search goes with BeamSearchParams, not SamplingParams")
    return llm.generate(prompts, BeamSearchParams() if params is None else params)


def describe(llm: LLMInterface) -> str:
    """Return a line with the model's name, source, size and device, and the size of its pool."""
    engine = llm._driver.engine
    model, cache = engine.runner.model, engine.cache
    where = f"{model.device}, {str(model.dtype).removeprefix('torch.')}"
    pool = f"{cache.num_blocks:,} blocks of {cache.block_size} tokens"
    size = f"{model.config.num_parameters / 1e6:,.0f}M parameters"
    return f"<LLM: {llm.name}, {engine.source}, {size}, {where}, {pool}>"


def chat(
    llm: LLMInterface,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    params: SomeParams = None,
    *,
    sampling_params: SomeParams = None,
    use_tqdm: bool | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[RequestOutput]:
    """Answer one conversation or many, each a list of ``{"role": …, "content": …}``, with the model's chat template.

    Args:
        messages: see `minillm.text.chat_template.plain_messages`.
        chat_template: a Jinja template to use instead of the model's own.
        add_generation_prompt, continue_final_message: see `minillm.text.chat_template.ChatTemplate.render`.
    """
    several = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], list | tuple)
    conversations: Sequence[Any] = messages if several else [messages]
    render = partial(
        llm.tokenizer.apply_chat_template,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
    )
    prompts = [render(each) for each in conversations]
    return llm.generate(prompts, sampling_params if params is None else params, use_tqdm=use_tqdm)


def request_of(engine: Engine, prompt: Prompt, params: Params, **options: Any) -> Request:
    """Return a request for a prompt. ``options``: other fields of the `Request`."""
    return Request(token_ids_of(engine, prompt), params, prompt if isinstance(prompt, str) else None, **options)


def refusal(prompt: Prompt, error: MinillmError) -> RequestOutput:
    """Return an output that reports why a prompt was rejected."""
    text = prompt if isinstance(prompt, str) else None
    ids = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else []
    return RequestOutput("", text, ids, outputs=[], finished=True, error=str(error))


def stream(
    llm: LLMInterface, prompt: Prompt, params: Params | None = None, *, request_id: str = ""
) -> Generator[Delta, None, None]:
    """Complete one prompt, and yield the additions of each step. Leaving the iterator early aborts the request.

    Deltas have no log-probabilities; use `generate` for these. Raises MinillmError if the request fails.
    """
    [params] = params_list(params, 1, llm.default_params)
    engine = llm._driver.engine
    jobs = iter([[(0, partial(request_of, engine, prompt, params, streamed=True, request_id=request_id))]])
    for _, result in llm._driver.run(lambda num_free_seqs: next(jobs, [])):
        if isinstance(result, Delta):
            yield result
        elif result.error is not None:
            raise MinillmError(result.error)


def astream(llm: LLMInterface, prompt: Prompt, params: Params | None = None) -> AsyncGenerator[Delta, None]:
    """Run `stream` for asyncio. Several streams run in one batch. Leaving a stream early aborts its request."""
    return in_threads(stream(llm, prompt, params))


def get_tokenizer(llm: LLMInterface) -> Tokenizer:
    """Return the tokenizer. (vLLM has a function of this name.)"""
    return llm.tokenizer


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_stats(llm: LLMInterface) -> CacheStats:
    """Return the pool's present memory use, and totals since the start."""
    with llm._driver.locked() as engine:
        return engine.figures.cache_stats()


def reset_prefix_cache(llm: LLMInterface) -> None:
    """Remove every cached prefix. Running requests are not affected."""
    with llm._driver.locked() as engine:
        engine.cache.reset_prefix_cache()


def explain_miss(llm: LLMInterface, prompt: Prompt, *, salt: str | None = None) -> PrefixReport:
    """Return how many tokens of a prompt are cached, and where the prompt differs from the best matching prefix."""
    token_ids = token_ids_of(llm._driver.engine, prompt)
    with llm._driver.locked() as engine:
        salt = salt_for(salt, len(token_ids), engine.requests.longest_plain_prompt)
        report = explain_cache_miss(engine.cache, token_ids, salt)
        tokenizer = engine.tokenizer
    differing = [each for each in (report.expected, report.found) if each is not None]
    texts = {} if tokenizer is None else {each: tokenizer.decode([each]) for each in differing}
    return replace(report, texts=texts)


def pin(llm: LLMInterface, prompt: Prompt, *, salt: str | None = None) -> PinnedPrefix:
    """Compute a prefix, such as a system prompt, and never evict its blocks until it is unpinned.

    Raises CapacityError if more than half of the pool would be pinned, or a running or waiting request would not fit.
    """
    [(sequence, _)] = idle_sequences.hold(
        llm._driver, [idle_sequences.prefix_request(token_ids_of(llm._driver.engine, prompt), salt)]
    )
    idle_sequences.pin(llm._driver, sequence)
    return PinnedPrefix(sequence.token_ids[:-1], sequence, llm._driver)


def unpin(llm: LLMInterface, prefix: PinnedPrefix) -> None:
    """Unpin a prefix. It stays in the prefix cache until its blocks are needed. Unpinning it again does nothing."""
    if not isinstance(prefix, PinnedPrefix):
        raise UsageError(f"unpin takes what pin has returned, not {type(prefix).__name__}")
    if prefix.driver is not llm._driver:
        raise UsageError("this prefix is pinned in another LLM; unpin it with that one")
    idle_sequences.unpin(llm._driver, prefix.sequence)


# --- branches ---------------------------------------------------------------------------------------------------------


def branch(llm: LLMInterface, prompt: Prompt) -> Branch:
    """Return a branch that begins with ``prompt``; see `minillm.branch.Branch`."""
    token_ids = token_ids_of(llm._driver.engine, prompt)
    llm._driver.engine.requests.check_prompt(token_ids)
    return Branch(llm._driver, token_ids)


def sample(
    llm: LLMInterface, branches_: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[CompletionOutput]:
    """Continue several branches in one batch. Return the completions.

    ``params`` is one set for all branches, or a list with one set for each. ``n`` must be 1.
    """
    return branches.sample(llm._driver, branches_, params)


def next_logprobs(llm: LLMInterface, branches_: Sequence[Branch], count: int = 20) -> list[list[tuple[int, float]]]:
    """Return the ``count`` most probable next tokens of each branch, computed in one batch. Append nothing.

    The list of a branch has (token id, log-probability) pairs, best first.
    """
    return branches.next_logprobs(llm._driver, branches_, count)
