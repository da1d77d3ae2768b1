"""Branches: fork / append / free for callers. Tree search, best-of-n, agents and roll-outs are made of these.

A branch is a text under way whose K and V stay in the cache. Forking one shares its blocks; going on from it computes
only what is new; rolling it back gives blocks up. Nothing is computed before it is needed, and many branches go on
together in one batch (`LLM.sample`, `LLM.next_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from minillm.errors import UsageError
from minillm.outputs import CompletionOutput
from minillm.params import SamplingParams
from minillm.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from minillm.llm import LLM


class Branch:
    """Made by `LLM.branch` and `fork`. Free it, or use it in a ``with`` statement; blocks of one that is forgotten are
    given up when the pool needs them.
    """

    def __init__(self, llm: LLM, token_ids: list[int], sequence: TokenSequence | None = None) -> None:
        self._llm = llm
        self.token_ids = token_ids  # all of them, the prompt's too
        self.sequence = sequence  # the idle sequence that holds the blocks of its beginning
        self.freed = False

    def fork(self) -> Branch:
        """Another branch at this point. It shares every block; the first to write to a partly filled one copies it."""
        self.check()
        sequence = None if self.sequence is None else self._llm.fork_idle(self.sequence)
        return Branch(self._llm, list(self.token_ids), sequence)

    def append(self, text: str | Sequence[int]) -> Self:
        """Go on with text or token ids that the caller gives.

        Raises:
            UsageError: they are none of this model's, or more than its context holds; the branch stays as it was.
        """
        self.check()
        longer = self.token_ids + self._llm.token_ids(text, add_special_tokens=False)
        self._llm.engine.check_prompt(longer)
        self.token_ids = longer
        return self

    def sample(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Go on with what the model says. Several branches at once: `LLM.sample`.

        The tokens of the completion become part of the branch, an end-of-sequence token excepted.
        """
        return self._llm.sample([self], params)[0]

    def logprobs(self, count: int = 20) -> list[tuple[int, float]]:
        """The most probable next tokens, best first, as (token id, log-probability). The branch stays where it is."""
        return self._llm.next_logprobs([self], count)[0]

    def rollback(self, num_tokens: int) -> Self:
        """Take the last tokens back.

        Raises:
            UsageError: there are fewer, or none would be left.
        """
        self.check()
        if not 0 <= num_tokens < len(self.token_ids):
            raise UsageError(f"cannot roll back {num_tokens} of {len(self.token_ids)} tokens: one must be left")
        if num_tokens:
            del self.token_ids[-num_tokens:]
            if self.sequence is not None:
                self.sequence = self._llm.fork_idle(self.sequence, len(self.token_ids), replace=True)
        return self

    def free(self) -> None:
        """Let the blocks go. A freed branch cannot be used; freeing it again does nothing."""
        if not self.freed and self.sequence is not None:
            self._llm.release(self.sequence)
        self.freed, self.sequence = True, None

    @property
    def text(self) -> str:
        """The text of the whole branch, the prompt included."""
        return self._llm.tokenizer.decode(self.token_ids)

    def check(self) -> None:
        """Raise UsageError if it has been freed."""
        if self.freed:
            raise UsageError("this branch has been freed; fork before you free")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()
