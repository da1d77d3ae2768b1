"""Test the server's requests on one engine, without a process: which blocks are kept and which are freed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest

from lib.engine import engine_for
from lib.models import hf_model, ours
from minillm.engine.driver import Driver
from minillm.errors import MinillmError, UsageError
from minillm.model.llama import Llama
from minillm.parallel.channel import RankDied
from minillm.params import BeamSearchParams, SamplingParams
from minillm.runner.penalties import NOTHING_ALLOWED
from minillm.service import call_messages as messages
from minillm.service import engine_requests
from minillm.service.engine_requests import EngineRequests
from minillm.service.messages import CacheChanged, RequestFailed, decode_event
from minillm.service.prepare import Prepared
from minillm.service.sessions import Sessions


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model(vocab_size=97))


def around(model: Llama) -> tuple[EngineRequests, list[messages.AnyEvent]]:
    """The requests of an engine, and the events that they send."""
    events: list[messages.AnyEvent] = []
    return EngineRequests(Driver(engine_for(model)), events.append), events


def prepared(name: str, prompt: list[int], count: int = 3, **options: Any) -> Prepared:
    params: dict[str, Any] = {"max_tokens": count, "temperature": 0.0}
    call = messages.Complete(name, "tenant", prompt, params, **options)
    return Prepared(call, prompt, SamplingParams(**params), in_reasoning=False)


def run(requests: EngineRequests) -> None:
    while requests.engine.has_work:
        requests.step()


def test_as_many_answers_can_be_forked_as_the_limit_allows(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has 8 tokens with its prompt, so only the latest two are kept."""
    monkeypatch.setattr(engine_requests, "_MOST_FORKABLE_TOKENS", 20)
    inside, _ = around(model)
    for number in range(6):
        inside.add(prepared(f"r{number}", [5, 6, 7, 8, 9 + number]))
        run(inside)
        assert list(inside.forkable) == [f"r{each}" for each in range(max(0, number - 1), number + 1)]


@pytest.mark.parametrize("ranked", [True, False])
def test_the_best_of_several_are_the_most_probable_by_token(model: Llama, ranked: bool) -> None:
    inside, events = around(model)
    each = prepared("best", [5, 6, 7], ranked=ranked)
    params = SamplingParams(n=4, max_tokens=6, seed=1, temperature=3.0, logprobs=0, stop_token_ids=[*range(40)])
    inside.add(replace(each, params=params))
    run(inside)
    [ended] = [event for event in events if isinstance(event, messages.Ended)]
    means = [(one.cumulative_logprob or 0.0) / one.num_tokens for one in ended.completions]
    assert len({one.num_tokens for one in ended.completions}) > 1
    assert (means == sorted(means, reverse=True)) == ranked
    by_index = {one.index: one.num_tokens for one in ended.completions}
    assert [by_index[one.index] for one in ended.completions] == [*map(len, inside.forkable["best"].output_ids)]


def test_a_request_that_is_aborted_while_it_is_prepared_never_runs(model: Llama) -> None:
    inside, events = around(model)
    inside.preparing |= {"gone", "wrong", "stays"}
    inside.abort("gone")
    inside.abort("wrong")
    inside.add(prepared("gone", [5, 6]))
    inside.refuse("wrong", UsageError("nobody waits for this"))
    inside.add(prepared("stays", [5, 6]))
    assert list(inside.running) == ["stays"]
    run(inside)
    assert [event.request_id for event in events if isinstance(event, messages.Ended | RequestFailed)] == ["stays"]
    assert not inside.preparing
    inside.preparing.add("gone")
    inside.add(prepared("gone", [5, 6]))  # an id that is used again is another request
    assert list(inside.running) == ["gone"]
    run(inside)


def test_an_answer_that_was_aborted_cannot_be_forked_and_holds_no_block(model: Llama) -> None:
    inside, _ = around(model)
    for name in ("gone", "stays"):
        inside.add(prepared(name, [5, 6, 7], 9))
    inside.step()
    inside.abort("gone")
    run(inside)
    assert list(inside.forkable) == ["stays"]
    kept = {block for each in inside.forkable["stays"].sequences for block in each.blocks}
    assert inside.engine.cache.num_free == inside.engine.cache.num_blocks - len(kept)


def test_watchers_see_the_pool_change(model: Llama) -> None:
    inside, events = around(model)
    sessions = Sessions(inside.driver, inside, events.append)  # type: ignore[arg-type]

    def seen() -> list[str]:
        changes = [decode_event(each.event) for each in events if isinstance(each, messages.SessionEvent)]
        return [table.owner for each in changes if isinstance(each, CacheChanged) for table in each.tables]

    sessions.open("w", watches=True)
    assert [event.session for event in events if isinstance(event, messages.SessionEvent)] == ["w"]
    inside.add(prepared("a", [5, 6, 7], keep=True))
    run(inside)
    sessions.report(now=True)
    assert seen() == ["a"]
    sessions.close("w")
    assert not inside.engine.cache.subscribers, "nobody looks any more"
    assert not sessions.ending, "without a step, it would stay in memory"
    inside.add(prepared("b", [5, 6, 7], keep=True))
    run(inside)
    sessions.report(now=True)
    assert seen() == ["a"]


def test_the_pool_is_read_as_it_is(model: Llama) -> None:
    inside, events = around(model)
    inside.add(prepared("kept", [5, 6, 7, 8, 9, 10, 11], keep=True))
    inside.add(prepared("gone", [9, 8, 7, 6, 5, 4, 3]))
    run(inside)
    inside.read_cache(messages.ReadCache("c"))
    result = events[-1]
    assert isinstance(result, messages.Result)
    cache = inside.engine.cache
    assert result.value["cached_blocks"] == [block for block in range(cache.num_blocks) if cache.is_cached(block)] != []
    [table] = result.value["tables"]
    [held] = cache.tables.values()
    assert (table["request"], table["state"], table["blocks"]) == ("kept", "idle", held.blocks)
    assert result.value["figures"]["num_blocks"] == cache.num_blocks
    inside.report(now=True)
    figures = events[-1]
    assert isinstance(figures, messages.Figures)
    assert (figures.num_prefill_tokens, figures.num_decoded_tokens) == (14, 4)


def test_a_defect_in_one_request_refuses_that_one(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, events = around(model)
    samples: Any = inside.engine._methods[SamplingParams]
    append = samples.append

    def broken(group: Any, *rest: Any) -> Any:
        if group.request_id == "broken":
            raise IndexError("injected")
        return append(group, *rest)

    monkeypatch.setattr(samples, "append", broken)
    for name in ("first", "broken", "last"):
        inside.add(prepared(name, [5, 6, 7], keep=True))
    run(inside)
    ended = {event.request_id: event for event in events if isinstance(event, messages.Ended | RequestFailed)}
    assert isinstance(ended["first"], messages.Ended)
    assert isinstance(ended["last"], messages.Ended)
    refused = ended["broken"]
    assert isinstance(refused, RequestFailed)
    assert refused.kind == "internal"
    assert "IndexError: injected" in refused.error


def test_requests_of_a_model_without_one_of_its_ranks_get_no_error_of_the_device(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the process is the cause that clients are told."""
    inside, events = around(model)
    inside.add(prepared("a", [5, 6, 7]))

    def fail() -> NoReturn:
        inside.engine.requests.end(list(inside.engine.requests.groups.values()))
        raise RankDied("rank 1 of 2 is gone")

    monkeypatch.setattr(inside.engine, "step", fail)
    with pytest.raises(RankDied):
        inside.step()
    assert not events


@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams])
def test_parameters_that_exclude_every_token_are_a_usage_error(model: Llama, cls: Any) -> None:
    inside, events = around(model)
    params = cls(max_tokens=9, ignore_eos=True, allowed_token_ids=[5, 6], no_repeat_ngram_size=1)
    inside.add(replace(prepared("empty", [9, 8, 7]), params=params))
    run(inside)
    assert events == [RequestFailed("empty", NOTHING_ALLOWED.text, "usage")]


def test_an_internal_error_with_the_text_of_a_usage_error_is_internal(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, events = around(model)
    samples: Any = inside.engine._methods[SamplingParams]

    def broken(*_: Any) -> Any:
        raise MinillmError(NOTHING_ALLOWED.text)

    monkeypatch.setattr(samples, "append", broken)
    inside.add(prepared("broken", [9, 8, 7]))
    run(inside)
    assert events == [RequestFailed("broken", NOTHING_ALLOWED.text, "internal")]
