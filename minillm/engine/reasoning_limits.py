"""Limit the reasoning of requests, and count how many tokens of an answer are reasoning."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

from minillm.errors import UsageError
from minillm.outputs import CompletionOutput
from minillm.params import Params
from minillm.sequence import SequenceGroup
from minillm.text.reasoning import PROMPT_END
from minillm.text.reasoning_budget import ReasoningPosition, ReasoningTags, reasoning
from minillm.text.tokenizer import Tokenizer


class ReasoningLimits:
    """The reasoning of one model's requests. The tags are looked for when they are first needed."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids

    @cached_property
    def tags(self) -> ReasoningTags | None:
        """The tags around the model's reasoning, such as ``<think>``; None if the model has none."""
        return None if self._tokenizer is None else ReasoningTags.of(self._tokenizer)

    def without_impossible(self, params: Params) -> Params:
        """Return a chat's ``params``, without the limit on reasoning if this model has no tags around its reasoning.

        The limit was then set for another model.
        """
        return params if self.tags is not None else replace(params, max_reasoning_tokens=None)

    def position(self, params: Params, token_ids: Sequence[int]) -> ReasoningPosition | None:
        """Return the state of the reasoning limit at the end of a prompt, or None if the request has no limit.

        Raises UsageError if the model has no reasoning tags.
        """
        if (limit := params.max_reasoning_tokens) is None:
            return None
        if (tags := self.tags) is None:
            raise UsageError("max_reasoning_tokens: this model has no <think> and </think> tags; leave it out")
        is_open = tags.is_open(token_ids, self._eos_token_ids)
        return ReasoningPosition(
            tags, limit, is_open=is_open, first=len(token_ids), has_grammar=params.grammar is not None
        )

    def counted(self, group: SequenceGroup, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """Return a request's outputs with ``reasoning_tokens`` (how many tokens are reasoning) filled in."""
        if (tags := self.tags) is None:
            return outputs
        limit, prompt = group.params.max_reasoning_tokens, group.sequences[0].token_ids[: group.num_prompt_tokens]
        tail = prompt if limit is not None else prompt[-PROMPT_END:]
        is_open = group.in_reasoning or tags.is_open(tail, self._eos_token_ids)
        depths = getattr(group.params, "reasoning_depths", ())
        found = []
        for each in outputs:
            count = reasoning(tags, each.token_ids, is_open=is_open).count
            most = depths[each.index] if each.index < len(depths) else limit
            found.append(replace(each, reasoning_tokens=count if most is None else min(count, most)))
        return found
