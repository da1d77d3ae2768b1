"""Decide how many most probable tokens a CUDA graph lists for every row, for requests with ``logprobs``."""

from collections.abc import Sequence

from torch import Tensor

from minillm import kernels
from minillm.runner.drawn import MANY
from minillm.sequence import Chunk

LISTED = 5, 8, 16, 32  # possible numbers, so that there are few graphs


def wants_logprobs(draws: Sequence[Chunk]) -> bool:
    """Return whether any request wants log-probabilities of its draws."""
    return any(draw.group.params.logprobs is not None for draw in draws)


def num_listed(draws: Sequence[Chunk], vocab: int) -> int:
    """Return how many of the most probable tokens a graph should find for each row: one of `LISTED`, or 0 for none.

    The result covers the largest request. It is 0 if no request wants such tokens, or if one wants more than a graph
    can find. Requests for more than `MANY` tokens do not count, because the sampler sorts the logits for them.
    """
    most = max((c for draw in draws if 0 < (c := draw.group.params.logprobs or 0) <= MANY), default=0)
    return next((min(count, vocab) for count in LISTED if count >= most), 0) if most else 0


def listed(logits: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return log-probabilities and ids of each row's ``count`` most probable tokens. Empty tuple for 0 tokens."""
    return kernels.top_log_probabilities(logits, count) if count else ()
