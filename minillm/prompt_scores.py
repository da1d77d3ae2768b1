"""The log-probabilities that a request wants of its prompt's tokens."""

from dataclasses import dataclass

from minillm.outputs import PromptTokenLogprobs


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a prompt's tokens, as they become known."""

    num_top: int  # most probable tokens that are wanted in addition to each
    next: int  # the first token without a log-probability, computed or under way
    tokens: list[PromptTokenLogprobs | None]  # of the whole prompt

    def positions(self, first: int, end: int) -> range:
        """Return the positions from ``first`` to ``end`` that need logits: each predicts the token after it."""
        return range(max(first, self.next - 1), min(end, len(self.tokens) - 1))

    def shareable(self, token_ids: list[int]) -> list[int]:
        """Return the beginning of ``token_ids`` that may come from the cache: scored tokens must be computed."""
        return token_ids[: self.next] if self.next < len(self.tokens) else token_ids
