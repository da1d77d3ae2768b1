"""Branches: fork / append / free for callers. Use them to build tree search, best-of-n, agents and roll-outs.

A branch is a growing text that keeps its K and V in the cache. Nothing is computed before it is needed, and many
branches continue together in one batch (`sample`, `next_logprobs`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from typing import Self

from minillm.checks import check_integer, shown
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.prompts import token_ids_of, tokenizer_of
from minillm.engine.requests import Request
from minillm.errors import UsageError
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.params import MAX_LOGPROBS, Params, SamplingParams, params_list
from minillm.sequence import Sequence


class Branch:
    """A growing text with its K and V in the cache. `LLM.branch` and `fork` create branches.

    Free a branch, or use it in a ``with`` statement. The blocks of a branch that is never freed are evicted when the
    pool needs them.
    """

    def __init__(self, driver: Driver, token_ids: list[int], sequence: Sequence | None = None) -> None:
        self._driver = driver
        self.token_ids = token_ids  # prompt included
        self.sequence = sequence  # the idle sequence with the blocks computed so far
        self.freed = False

    def fork(self) -> Branch:
        """Return a new branch with the same tokens. It shares every block; a partly filled block is copied on write."""
        self.check()
        sequence = None if self.sequence is None else idle_sequences.fork_idle(self._driver, self.sequence)
        return Branch(self._driver, list(self.token_ids), sequence)

    def append(self, text: str | SequenceOf[int]) -> Self:
        """Append the caller's text or token ids.

        Raises:
            UsageError: an id is outside the vocabulary, or the context is too short. The branch is unchanged.
        """
        self.check()
        longer = self.token_ids + token_ids_of(self._driver.engine, text, after=self.token_ids)
        self._driver.engine.requests.check_prompt(longer)
        self.token_ids = longer
        return self

    def sample(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Let the model continue the branch. Append the completion, without an end token, and return it.

        Without ``params``, the model's own sampling parameters apply. `LLM.sample` continues several branches in one
        batch.
        """
        return sample(self._driver, [self], params)[0]

    def logprobs(self, count: int = 20) -> list[tuple[int, float]]:
        """Return the most probable next tokens, best first, as (token id, log-probability). Append nothing."""
        return next_logprobs(self._driver, [self], count)[0]

    def rollback(self, num_tokens: int) -> Self:
        """Remove the last ``num_tokens`` tokens. Raises UsageError if no token would be left."""
        self.check()
        num_tokens = check_integer("num_tokens", num_tokens, 0, sys.maxsize)
        if num_tokens >= len(self.token_ids):
            raise UsageError(f"cannot roll back {num_tokens} of {len(self.token_ids)} tokens: one must be left")
        if num_tokens:
            del self.token_ids[-num_tokens:]
            if self.sequence is not None:
                self.go_on_from(idle_sequences.fork_idle(self._driver, self.sequence, len(self.token_ids)))
        return self

    def free(self) -> None:
        """Free the branch's blocks. A freed branch cannot be used; freeing it again does nothing."""
        self.freed = True
        self.go_on_from(None)

    def go_on_from(self, sequence: Sequence | None) -> None:
        """Replace the branch's idle sequence, and free its blocks. Another thread may have freed the branch."""
        with self._driver.locked():
            unused, self.sequence = [self.sequence], sequence
            if self.freed:
                unused, self.sequence = [*unused, sequence], None
            for each in unused:
                if each is not None:
                    idle_sequences.release(self._driver, each)

    @property
    def text(self) -> str:
        """The text of the whole branch, the prompt included."""
        return tokenizer_of(self._driver.engine).decode(self.token_ids)

    def check(self) -> None:
        """Raise UsageError if the branch has been freed."""
        if self.freed:
            raise UsageError("this branch has been freed; fork before you free")

    def __repr__(self) -> str:
        return f"<Branch: {'freed' if self.freed else f'{len(self.token_ids)} tokens'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.free()


def sample(
    driver: Driver, branches: SequenceOf[Branch], params: Params | SequenceOf[Params] | None
) -> list[CompletionOutput]:
    """Continue several branches in one batch: append a completion to each, and return the completions."""
    _check(driver, branches)
    each_params = params_list(params, len(branches), driver.engine.default_params)
    own = [each for each in each_params if isinstance(each, SamplingParams)]
    if len(own) < len(branches):
        raise UsageError("a branch goes on with SamplingParams, not by beam search")
    if any(each.num_sequences != 1 for each in own):
        raise UsageError("a branch goes on with one completion: n=1, and no reasoning_depths; fork it to have several")
    if any(each.prompt_logprobs is not None for each in own):
        raise UsageError("prompt_logprobs are of a prompt, and a branch has none of its own; use LLM.score")
    completions = []
    eos_token_ids = driver.engine.requests.eos_token_ids
    for branch, (sequence, output) in zip(branches, _go_on(driver, branches, own), strict=True):
        completion = output.outputs[0]
        end = completion.token_ids[-1:] if completion.finish_reason == "stop" else []
        if end and (end[0] in eos_token_ids or end[0] == completion.stop_reason):
            sequence.token_ids.pop()  # the end token, which was never computed and takes no slot
        branch.go_on_from(sequence)
        branch.token_ids = list(sequence.token_ids)
        completions.append(completion)
    return completions


def next_logprobs(driver: Driver, branches: SequenceOf[Branch], count: int) -> list[list[tuple[int, float]]]:
    """Return the ``count`` most probable next tokens of each branch, computed in one batch. Append nothing.

    The list of a branch has (token id, log-probability) pairs, best first.
    """
    _check(driver, branches)
    count = check_integer("count", count, -1, MAX_LOGPROBS)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=count)
    result = []
    for branch, (sequence, output) in zip(branches, _go_on(driver, branches, [params] * len(branches)), strict=True):
        sequence.token_ids.pop()
        branch.go_on_from(sequence)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        result.append(list(logprobs[0].top))
    return result


def _check(driver: Driver, branches: SequenceOf[Branch]) -> None:
    if not isinstance(branches, SequenceOf) or not all(isinstance(each, Branch) for each in branches):
        raise UsageError(f"give a list of branches, not {shown(branches)}")
    for branch in branches:
        branch.check()
        if branch._driver is not driver:
            raise UsageError("this branch belongs to another LLM; continue it with that one")
    if len({id(branch) for branch in branches}) != len(branches):
        raise UsageError("the same branch twice in one batch; fork it")


def _go_on(
    driver: Driver, branches: SequenceOf[Branch], params: SequenceOf[SamplingParams]
) -> list[tuple[Sequence, RequestOutput]]:
    pairs = zip(branches, params, strict=True)
    requests = [Request(branch.token_ids, each, parent=branch.sequence, hold=True) for branch, each in pairs]
    return idle_sequences.hold(driver, requests)
