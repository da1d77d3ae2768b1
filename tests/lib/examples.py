"""The number of Hypothesis examples: `make test` draws a quarter as many as `make soak`."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return the number of examples to draw in a test that draws ``count`` by Hypothesis's default profile."""
    return count * settings().max_examples // 100
