"""Comparing the answers of an engine that guesses with those of one that does not."""

from __future__ import annotations

import torch

from minillm.engine.engine import Engine
from minillm.engine.speculation import GuessingSamples
from minillm.outputs import RequestOutput
from minillm.params import SamplingParams


def guesses_of(engine: Engine) -> GuessingSamples:
    method = engine._methods[SamplingParams]
    assert isinstance(method, GuessingSamples)
    return method


def facts(output: RequestOutput) -> list[object]:
    """Everything of an answer that must be the same; log-probabilities differ in their last digits."""
    completions = []
    for each in output.outputs:
        top = [[token for token, _ in one.top[:1]] for one in each.logprobs or []]
        completions.append((each.token_ids, each.text, each.finish_reason, each.stop_reason, top))
    # Where a completion fails, so does its request; how far the others have come by then is another matter.
    return [output.error, [] if output.error else completions]


def assert_close_logprobs(one: RequestOutput, other: RequestOutput) -> None:
    if one.error:  # see `facts`
        return
    for a, b in zip(one.outputs, other.outputs, strict=True):
        if a.logprobs is not None:
            assert b.logprobs is not None
            values = [[each.logprob for each in side] for side in (a.logprobs, b.logprobs)]
            assert torch.allclose(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-3)
