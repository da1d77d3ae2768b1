"""Log-probabilities of given texts: scores of prompts and of continuations, and perplexity."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minillm.checks import check_integer
from minillm.engine.driver import Driver
from minillm.engine.requests import Request
from minillm.errors import MinillmError, UsageError
from minillm.outputs import PromptTokenLogprobs, RequestOutput
from minillm.params import MAX_LOGPROBS, SamplingParams
from minillm.text.prompts import Prompt, prompt_list
from minillm.verbs import Host


@dataclass(frozen=True)
class Score:
    """The tokens of a text that are scored, in their order; of a text without a continuation, all but the first."""

    token_ids: list[int]  # of the whole text
    tokens: list[PromptTokenLogprobs]

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probability of each scored token, given all tokens before it."""
        return [token.logprob for token in self.tokens]

    @property
    def total(self) -> float:
        """The log-probability of all scored tokens together."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of the scored tokens' negative log-probabilities; NaN where there is none."""
        return _exp(-self.total / len(self.tokens)) if self.tokens else math.nan

    def __repr__(self) -> str:
        return f"Score({len(self.tokens)} tokens, total={self.total:.4f}, perplexity={self.perplexity:.4g})"


def score(
    llm: Host,
    prompts: Prompt | Iterable[Prompt],
    continuations: Prompt | Iterable[Prompt] | None = None,
    *,
    top: int = 0,
) -> list[Score]:
    """Score prompts, or continuations of them, in one batch; nothing is generated.

    A prompt is computed whole. Before a continuation, what the prefix cache has of the prompt is not computed
    again, so that any number of them share its blocks. Text becomes token ids piece by piece: a continuation is
    scored as the tokens that it is made of alone, and usually begins with a space.

    Args:
        prompts: see `minillm.llm.LLM.generate`.
        continuations: as many as prompts, or any number of them for one prompt. Their tokens alone are scored.
        top: beside each token, so many of the most probable ones, up to 64.

    Raises:
        MinillmError: a text is empty, too long or holds ids beyond the vocabulary; nothing has been scored then.
    """
    top, found = check_integer("top", top, 0, MAX_LOGPROBS), prompt_list(prompts)
    params = SamplingParams(max_tokens=0, prompt_logprobs=top)
    requests = []
    for number, (prompt, continuation) in enumerate(_pairs(found, continuations)):
        ids, behind = llm._driver.token_ids(prompt), 1
        if continuation is not None:
            more = llm._driver.token_ids(continuation, after=ids)
            if not ids or not more:
                raise UsageError(f"{'continuation' if ids else 'prompt'} {number} is empty; give at least a token")
            ids, behind = ids + more, len(ids)
        requests.append(Request(ids, params, score_from=behind))
    return [_score_of(output) for output in _outputs(llm._driver, requests)]


def perplexity(llm: Host, text: Prompt, *, stride: int | None = None) -> float:
    """Return ``exp`` of the mean negative log-probability of all tokens of a text but the first.

    A text longer than the context is read through a window of ``max_model_len`` tokens that moves on by ``stride``
    tokens. Every token is scored once, in the first window that reaches it, behind at least
    ``max_model_len - stride`` tokens (in the first window, behind all that there are). A smaller stride costs more
    windows and gives a lower, truer figure. What a tokenizer puts in front of a text stands in the first window.

    Args:
        text: text or token ids, of any length.
        stride: from 1 to ``max_model_len - 1``; by default half of ``max_model_len``.

    Raises:
        UsageError: fewer than two tokens, ids beyond the vocabulary, or a wrong stride.
    """
    window = llm._driver.engine.max_model_len
    stride = max(1, window // 2) if stride is None else stride
    if isinstance(stride, bool) or not isinstance(stride, int) or not 1 <= stride < window:
        raise UsageError(f"stride must be from 1 to {window - 1} (max_model_len - 1), not {stride!r}")
    ids = llm._driver.token_ids(text, whole=False)
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
    """Yield (first token, first scored token, end) of each window over ``count`` tokens; token 0 is not scored."""
    first, scored = 0, 1
    while scored < count:
        end = min(first + size, count)
        yield first, scored, end
        first, scored = first + stride, end


def _outputs(driver: Driver, requests: Sequence[Request]) -> list[RequestOutput]:
    """Run requests; each must end without an error."""
    jobs = iter([[(number, lambda each=each: each) for number, each in enumerate(requests)]])

    def named(number: int, error: str) -> str:
        return f"prompt {number}: {error}" if len(requests) > 1 else error

    def refuse(number: int, error: MinillmError) -> RequestOutput:
        raise type(error)(named(number, str(error))) from None

    outputs: dict[int, RequestOutput] = {}
    for number, result in driver.run(lambda room: next(jobs, []), refuse=refuse):
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
