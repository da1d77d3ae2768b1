"""Log-probabilities of given texts: scores of prompts or continuations, and perplexity."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minillm.checks import check_integer
from minillm.engine.driver import Driver
from minillm.engine.prompts import token_ids_of
from minillm.engine.requests import Request
from minillm.errors import MinillmError, UsageError
from minillm.llm_methods import LLMInterface
from minillm.outputs import PromptTokenLogprobs, RequestOutput
from minillm.params import MAX_LOGPROBS, SamplingParams
from minillm.text.prompts import Prompt, prompt_list


@dataclass(frozen=True)
class Score:
    """The scored tokens of a text, in order: the continuation's tokens; without a continuation, all but the first."""

    token_ids: list[int]  # of the whole text
    tokens: list[PromptTokenLogprobs]

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probability of each scored token, given all tokens before it."""
        return [token.logprob for token in self.tokens]

    @property
    def total(self) -> float:
        """The log-probability of all scored tokens together: the sum of ``logprobs``."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean negative log-probability of the scored tokens; NaN if no token is scored."""
        return _exp(-self.total / len(self.tokens)) if self.tokens else math.nan

    def __repr__(self) -> str:
        return f"Score({len(self.tokens)} tokens, total={self.total:.4f}, perplexity={self.perplexity:.4g})"


def score(
    llm: LLMInterface,
    prompts: Prompt | Iterable[Prompt],
    continuations: Prompt | Iterable[Prompt] | None = None,
    *,
    top: int = 0,
) -> list[Score]:
    """Score prompts, or continuations of prompts, in one batch. Nothing is generated.

    Without continuations, every token of a prompt is computed. With continuations, cached blocks of the prompt are
    reused, so any number of continuations share them. Prompt and continuation are tokenized separately. A continuation
    usually begins with a space.

    Args:
        prompts: see `minillm.llm.LLM.generate`.
        continuations: one for each prompt, or any number for a single prompt. Only their tokens are scored.
        top: list this many of the most probable tokens with each scored token, up to 64.

    Raises:
        MinillmError: a text is empty, too long or has ids outside the vocabulary. Nothing is scored then.
    """
    top, found = check_integer("top", top, 0, MAX_LOGPROBS), prompt_list(prompts)
    params = SamplingParams(max_tokens=0, prompt_logprobs=top)
    requests = []
    for number, (prompt, continuation) in enumerate(_pairs(found, continuations)):
        ids, behind = token_ids_of(llm._driver.engine, prompt), 1
        if continuation is not None:
            more = token_ids_of(llm._driver.engine, continuation, after=ids)
            if not ids or not more:
                raise UsageError(f"{'continuation' if ids else 'prompt'} {number} is empty; give at least a token")
            ids, behind = ids + more, len(ids)
        requests.append(Request(ids, params, score_from=behind))
    return [_score_of(output) for output in _outputs(llm._driver, requests)]


def perplexity(llm: LLMInterface, text: Prompt, *, stride: int | None = None) -> float:
    """Return a text's perplexity: ``exp`` of the mean negative log-probability of its tokens, without the first token.

    A text longer than the context is scored in windows of ``max_model_len`` tokens, each ``stride`` tokens after the
    previous one. Every token is scored once, in the first window that contains it. So, except in the first window,
    every scored token has at least ``max_model_len - stride`` tokens before it. A smaller stride takes more windows and
    gives a lower, more accurate result. Special tokens at the start of the text are only in the first window.

    Args:
        text: text or token ids, of any length.
        stride: from 1 to ``max_model_len - 1``; by default half of ``max_model_len``.

    Raises:
        UsageError: the text has fewer than two tokens or ids outside the vocabulary, or the stride is wrong.
    """
    window = llm._driver.engine.max_model_len
    stride = max(1, window // 2) if stride is None else stride
    if isinstance(stride, bool) or not isinstance(stride, int) or not 1 <= stride < window:
        raise UsageError(f"stride must be from 1 to {window - 1} (max_model_len - 1), not {stride!r}")
    ids = token_ids_of(llm._driver.engine, text, whole=False)
    if len(ids) < 2:
        raise UsageError(f"a perplexity needs at least two tokens, and the text has {len(ids)}")
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    requests = [
        Request(ids[first:end], params, score_from=scored - first)
        for first, scored, end in _windows(len(ids), window, stride)
    ]
    total = math.fsum(_score_of(output).total for output in _outputs(llm._driver, requests))
    return _exp(-total / (len(ids) - 1))


def _pairs(
    prompts: list[Prompt], continuations: Prompt | Iterable[Prompt] | None
) -> Iterable[tuple[Prompt, Prompt | None]]:
    if continuations is None:
        return [(prompt, None) for prompt in prompts]
    more = prompt_list(continuations)
    if len(prompts) != len(more) and len(prompts) != 1:
        raise UsageError(f"{len(more)} continuations for {len(prompts)} prompts; give one for each, or one prompt")
    return zip(prompts * len(more) if len(prompts) == 1 else prompts, more, strict=True)


def _windows(count: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, first scored token, end) of each window over ``count`` tokens. Token 0 is never scored."""
    first, scored = 0, 1
    while scored < count:
        end = min(first + size, count)
        yield first, scored, end
        first, scored = first + stride, end


def _outputs(driver: Driver, requests: Sequence[Request]) -> list[RequestOutput]:
    """Run requests and return their outputs in order. Raises MinillmError if a request is rejected or fails."""
    jobs = iter([[(number, lambda each=each: each) for number, each in enumerate(requests)]])

    def named(number: int, error: str) -> str:
        return f"prompt {number}: {error}" if len(requests) > 1 else error

    def refuse(number: int, error: MinillmError) -> RequestOutput:
        raise type(error)(named(number, str(error))) from None

    outputs: dict[int, RequestOutput] = {}
    for number, result in driver.run(lambda num_free_seqs: next(jobs, []), refuse=refuse):
        assert isinstance(result, RequestOutput), "nothing is streamed"
        if result.error is not None:
            raise MinillmError(named(number, result.error))
        outputs[number] = result
    return [outputs[number] for number in range(len(requests))]


def _score_of(output: RequestOutput) -> Score:
    tokens = output.prompt_logprobs
    assert tokens is not None
    return Score(output.prompt_token_ids, [token for token in tokens if token is not None])


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
