"""Answer a prompt after several amounts of reasoning (depths, in tokens). The reasoning itself is computed once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minillm.checks import check_integer, shown
from minillm.errors import MinillmError, UsageError
from minillm.llm_methods import LLMInterface, Message
from minillm.outputs import CompletionOutput
from minillm.params import MAX_TOKENS, SamplingParams
from minillm.text.prompts import Prompt
from minillm.text.reasoning import LeadingReasoning
from minillm.text.reasoning_budget import reasoning

_ANSWER = 1024  # tokens after the deepest reasoning, by default


@dataclass(frozen=True)
class DepthAnswer:
    """The answer after a number of reasoning tokens.

    Attributes:
        depth: the limit on the reasoning.
        text: the answer, without the reasoning.
        num_own_tokens: generated tokens that no other answer shares. 0: the reasoning ended before this depth, so the
            answer is the same as at the deepest depth.
        output: reasoning and answer, with token ids and log-probabilities.
    """

    depth: int
    text: str
    num_own_tokens: int
    output: CompletionOutput = field(repr=False)


def depths(
    llm: LLMInterface, prompt: Prompt | Sequence[Message], depths: Sequence[int], params: SamplingParams | None = None
) -> list[DepthAnswer]:
    """Answer a prompt after each of several numbers of reasoning tokens, in order.

    The reasoning runs once, to the deepest depth. At each depth, a fork of the sequence ends the reasoning there, as
    ``max_reasoning_tokens`` would, and answers. Meanwhile the reasoning continues. All answers share the reasoning's
    blocks. Each answer is the same as that of a separate request with ``max_reasoning_tokens=depth`` and the same
    ``seed``.

    Args:
        prompt: see `minillm.llm.LLM.generate`; or a conversation, as for `minillm.llm.LLM.chat`.
        depths: numbers of tokens; 0 answers at once.
        params: ``max_tokens`` counts reasoning and answer, so it must be above the deepest depth; ``n`` must be 1. The
            default is `minillm.llm.LLM.default_params`, with 1,024 tokens after the deepest depth.

    Raises:
        UsageError: the model has no reasoning tags, or a parameter is wrong.
        MinillmError: the request fails.
    """
    if isinstance(depths, str) or not isinstance(depths, Sequence) or not depths:
        raise UsageError(f"depths must be a list of numbers of tokens, not {shown(depths)}")
    wanted = [check_integer("depths", depth, 0, MAX_TOKENS - _ANSWER) for depth in depths]
    *shallow, deepest = distinct = sorted(set(wanted))
    params = replace(llm.default_params(), max_tokens=deepest + _ANSWER) if params is None else params
    if not isinstance(params, SamplingParams):
        raise UsageError(f"depths need SamplingParams, not {type(params).__name__}")
    if params.n > 1:
        raise UsageError(f"n must be 1 for depths, not {params.n}: each depth has one answer")
    if params.max_tokens <= deepest:
        raise UsageError(f"max_tokens is {params.max_tokens}; it must be above the deepest of depths, {deepest}")
    text: Any = prompt
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping) and "role" in prompt[0]:
        text = llm.tokenizer.apply_chat_template(prompt)
    [output] = llm.generate([text], replace(params, max_reasoning_tokens=deepest, reasoning_depths=shallow))
    if output.error is not None:
        raise MinillmError(output.error)
    requests = llm._driver.engine.requests
    tags = requests.reasoning.tags
    assert tags is not None, "the request would have been rejected"
    inside = tags.is_open(output.prompt_token_ids, requests.eos_token_ids)
    first = reasoning(tags, output.outputs[-1].token_ids, is_open=inside).first
    outputs = dict(zip(distinct, output.outputs, strict=True))
    return [_answer(depth, outputs[depth], outputs[deepest], first, inside) for depth in wanted]


def _answer(depth: int, output: CompletionOutput, deepest: CompletionOutput, first: int, inside: bool) -> DepthAnswer:
    """Return the answer after ``depth`` reasoning tokens.

    Args:
        output: the completion that stops reasoning at this depth.
        deepest: the completion with the deepest depth.
        first: the number of generated tokens before the reasoning.
        inside: the prompt ends within the reasoning.
    """
    splitter = LeadingReasoning(inside=inside)
    pieces = splitter.push(output.text) + splitter.finish()
    text = "".join(piece for is_reasoning, piece in pieces if not is_reasoning)
    shared = 0
    if output is not deepest:
        shared = first + depth if output.reasoning_tokens == depth else len(output.token_ids)
    return DepthAnswer(depth, text, len(output.token_ids) - shared, output)
