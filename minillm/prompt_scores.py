"""The scores (log-probabilities) of a prompt's tokens that a request asks for."""

from dataclasses import dataclass

from minillm.outputs import PromptTokenLogprobs


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a prompt's tokens, filled in as steps compute them."""

    num_top: int  # number of most probable tokens to list with each token
    next: int  # index of the first token to score that no launched step has scored
    tokens: list[PromptTokenLogprobs | None]  # one for each token of the prompt

    def positions(self, first: int, end: int) -> range:
        """Return which of the positions ``first … end - 1`` need logits: those right before a token to score."""
        return range(max(first, self.next - 1), min(end, len(self.tokens) - 1))

    def shareable(self, token_ids: list[int]) -> list[int]:
        """Return the first tokens of a prompt that may come from the cache.

        Later tokens must be computed to be scored.
        """
        return token_ids[: self.next] if self.next < len(self.tokens) else token_ids
