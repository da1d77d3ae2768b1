"""Compare the answers of engines with and without speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib.cache_checks import check, check_swap
from lib.models import hf_model, ours
from minillm import kernels
from minillm.bench.speculate import let_count
from minillm.engine.engine import Engine
from minillm.engine.requests import Request
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import SamplingParams
from minillm.speculation.method import SpeculativeSamples


def guesses_of(engine: Engine) -> SpeculativeSamples:
    method = engine._methods[SamplingParams]
    assert isinstance(method, SpeculativeSamples)
    return method


def counting_model(**sizes: Any) -> Llama:
    """Return a model that continues token t with t + 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.cpu, "packed_linear", lambda *_: None)  # the head is written over
        counting = ours(hf_model(**sizes))
    assert let_count(counting)
    return counting


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


def play(
    engine: Engine,
    requests: list[Request],
    arrivals: list[int],
    aborts: dict[int, str],
    failed: Callable[[Exception], bool] = lambda error: False,
) -> dict[str, RequestOutput]:
    """Run requests that start and abort before certain steps. Check the bookkeeping after each step and at the end."""
    waiting = sorted(range(len(requests)), key=lambda number: arrivals[number])
    outputs: dict[str, RequestOutput] = {}
    streamed: dict[tuple[str, int], list[int]] = {}
    step = 0
    while engine.has_work or waiting:
        while waiting and (arrivals[waiting[0]] <= step or not engine.has_work):
            engine.add(requests[waiting.pop(0)])
        if step in aborts:
            engine.abort(aborts[step])
        try:
            for delta in engine.step():
                if not delta.replaces:
                    streamed.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        except Exception as error:
            if not failed(error):
                raise
        check(engine.cache)
        check_swap(engine.scheduler.preemption.swap)
        outputs.update({output.request_id: output for output in engine.take_finished()})
        step += 1
        assert step < 5000, "no progress"
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    assert (swap := engine.scheduler.preemption.swap).num_free == swap.num_blocks, "host blocks leaked"
    assert len(outputs) == len(requests), "a request was lost"
    for request in requests:
        if isinstance(request.params, SamplingParams):
            for each in outputs[request.request_id].outputs:
                assert streamed.get((request.request_id, each.index), []) == each.token_ids
    return outputs


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    assert facts(one) == facts(other)
    assert_close_logprobs(one, other)


def assert_begins(part: RequestOutput, whole: RequestOutput) -> None:
    """Check that an aborted answer is a prefix of the whole one, or all of it.

    Where it has failed as the whole one does, before it was aborted, either may have come further: see `facts`.
    """
    assert part.error in (None, whole.error)
    if part.error is not None:
        for a, b in zip(part.outputs, whole.outputs, strict=False):
            both = min(len(a.token_ids), len(b.token_ids))
            assert a.token_ids[:both] == b.token_ids[:both]
        return
    assert_begins_at_error(part, whole)
    for a, b in zip(part.outputs, whole.outputs, strict=False):
        assert a.finish_reason in ("abort", b.finish_reason)


def assert_begins_at_error(part: RequestOutput, whole: RequestOutput) -> None:
    for a, b in zip(part.outputs, whole.outputs, strict=False):
        assert b.token_ids[: len(a.token_ids)] == a.token_ids
