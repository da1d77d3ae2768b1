"""Methods of `minillm.llm.LLM` besides generation, as functions of an LLM: branches, pinned prefixes, the cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from minillm import branch as branches
from minillm.branch import Branch
from minillm.cache import CacheStats, PrefixReport
from minillm.cache import explain_miss as explain_cache_miss
from minillm.engine import held
from minillm.engine.driver import Driver
from minillm.engine.requests import Request
from minillm.errors import UsageError
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams, params_list
from minillm.sequence import Sequence as TokenSequence
from minillm.text.prompts import Prompt


class Host(Protocol):
    """An LLM, as far as these functions use it."""

    _driver: Driver

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of a call that gives none."""

    def generate(self, prompts: Prompt | Iterable[Prompt], params: Params | None = None) -> list[RequestOutput]:
        """See `LLM.generate`."""


@dataclass(frozen=True)
class PinnedPrefix:
    """A prefix that `LLM.pin` keeps, for `LLM.unpin`."""

    token_ids: list[int]
    sequence: TokenSequence = field(repr=False)


def beam_search(
    llm: Host, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams | None = None
) -> list[RequestOutput]:
    """Run `generate` by beam search: each output's completions are its best beams, the best first."""
    return llm.generate(prompts, params or BeamSearchParams())


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_stats(llm: Host) -> CacheStats:
    """Return token-true memory figures of the pool, now."""
    with llm._driver.locked() as engine:
        return engine.figures.cache_stats()


def reset_prefix_cache(llm: Host) -> None:
    """Forget every cached prefix; running requests are not disturbed."""
    with llm._driver.locked() as engine:
        engine.cache.reset_prefix_cache()


def explain_miss(llm: Host, prompt: Prompt, *, salt: str | None = None) -> PrefixReport:
    """Return how many tokens of a prompt the prefix cache holds, and which token differs first."""
    token_ids = llm._driver.token_ids(prompt)
    with llm._driver.locked() as engine:
        report = explain_cache_miss(engine.cache, token_ids, engine.requests.salt_for(len(token_ids), salt))
        tokenizer = engine.tokenizer
    differing = [each for each in (report.expected, report.found) if each is not None]
    texts = {} if tokenizer is None else {each: tokenizer.decode([each]) for each in differing}
    return replace(report, texts=texts)


def pin(llm: Host, prompt: Prompt, *, salt: str | None = None) -> PinnedPrefix:
    """Compute a prefix, such as a system prompt, and keep its blocks under any load until it is unpinned.

    Raises CapacityError if more than half of the pool would be pinned.
    """
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    [(sequence, _)] = held.hold(llm._driver, [Request(llm._driver.token_ids(prompt), params, hold=True, salt=salt)])
    held.pin(llm._driver, sequence)
    return PinnedPrefix(sequence.token_ids[:-1], sequence)


def unpin(llm: Host, prefix: PinnedPrefix) -> None:
    """Unpin a prefix; it stays in the prefix cache until its blocks are needed. Twice does nothing."""
    held.unpin(llm._driver, prefix.sequence)


# --- branches ---------------------------------------------------------------------------------------------------------


def branch(llm: Host, prompt: Prompt) -> Branch:
    """Return a branch that begins with ``prompt``; see `minillm.branch.Branch`."""
    token_ids = llm._driver.token_ids(prompt)
    llm._driver.engine.requests.check_prompt(token_ids)
    return Branch(llm._driver, token_ids)


def sample(
    llm: Host, branches_: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[CompletionOutput]:
    """Continue several branches in one batch; ``params`` are one set for all or one for each, with ``n`` 1."""
    each = [p for p in params_list(params, len(branches_), llm.default_params) if isinstance(p, SamplingParams)]
    if len(each) != len(branches_):
        raise UsageError("a branch goes on with SamplingParams, not by beam search")
    return branches.sample(llm._driver, branches_, each)


def next_logprobs(llm: Host, branches_: Sequence[Branch], count: int = 20) -> list[list[tuple[int, float]]]:
    """Return the ``count`` most probable next tokens of each branch, in one batch; the branches stay as they are."""
    return branches.next_logprobs(llm._driver, branches_, count)
