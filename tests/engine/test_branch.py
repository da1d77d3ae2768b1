"""Branches: fork, append, sample, log-probabilities, rollback, free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.cache_checks import check
from lib.models import write_sentencepiece_model
from minillm.branch import Branch
from minillm.engine import idle_sequences
from minillm.engine.request_fields import bad_word_ids
from minillm.errors import MinillmError, UsageError
from minillm.llm import LLM
from minillm.params import BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", num_blocks=64, block_size=4)


@pytest.fixture(autouse=True)
def balanced(llm: LLM) -> Iterator[None]:
    yield
    check(llm.engine.cache)
    assert llm.cache_stats().free_blocks == 64, "blocks leaked"


def test_sampling_a_branch_is_generating_from_its_tokens(llm: LLM) -> None:
    with llm.branch("hello there") as branch:
        before = list(branch.token_ids)
        first = branch.sample(GREEDY)
        second = branch.append(" and").sample(GREEDY)
        middle = llm.tokenizer.encode(" and", add_special_tokens=False)
        assert branch.token_ids == [*before, *first.token_ids, *middle, *second.token_ids]
        start = [*before, *first.token_ids, *middle]
        assert llm.generate([start], GREEDY)[0].outputs[0].token_ids == second.token_ids


def test_forks_share_blocks_and_go_their_own_ways(llm: LLM) -> None:
    trunk = llm.branch(list(range(40, 59)))
    trunk.sample(GREEDY)
    used = llm.cache_stats().used_blocks
    forks = [trunk.fork() for _ in range(4)]
    stats = llm.cache_stats()
    assert stats.used_blocks == used
    assert stats.logical_blocks == 5 * used
    params = [SamplingParams(max_tokens=5, seed=i, ignore_eos=True) for i in range(4)]
    completions = llm.sample(forks, params)
    alone = [llm.generate([trunk.token_ids], p)[0].outputs[0].token_ids for p in params]
    assert [completion.token_ids for completion in completions] == alone
    assert llm.cache_stats().used_blocks < 5 * used
    for branch in [trunk, *forks]:
        branch.free()


def test_many_branches_go_on_in_one_batch(llm: LLM) -> None:
    branches = [llm.branch([50 + i, 60, 70]) for i in range(8)]
    llm.sample(branches, GREEDY)
    steps = llm.engine.figures.num_steps
    llm.sample(branches, GREEDY)
    assert llm.engine.figures.num_steps - steps == 6
    for branch in branches:
        branch.free()


def test_logprobs_leave_the_branch_where_it_is(llm: LLM) -> None:
    with llm.branch("hello") as branch:
        tokens = list(branch.token_ids)
        best = branch.logprobs(5)
        assert branch.token_ids == tokens
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
        assert branch.sample(GREEDY).token_ids[0] == best[0][0]


@pytest.mark.parametrize("method", [Branch.free, Branch.sample])
def test_no_block_stays_if_two_threads_use_a_branch(llm: LLM, monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    branch = llm.branch([50, 60, 70])
    branch.sample(GREEDY)
    hold = idle_sequences.hold

    def hold_while_another_thread_calls(*arguments: Any) -> Any:
        found = hold(*arguments)
        monkeypatch.undo()
        method(branch)
        return found

    monkeypatch.setattr(idle_sequences, "hold", hold_while_another_thread_calls)
    branch.sample(GREEDY)
    branch.free()


def test_rollback_takes_tokens_back_and_frees_their_blocks(llm: LLM) -> None:
    with llm.branch(list(range(40, 52))) as branch:
        first = branch.sample(GREEDY)
        other = branch.fork()
        branch.rollback(6)
        assert branch.token_ids == list(range(40, 52))
        assert branch.sample(GREEDY).token_ids == first.token_ids
        assert other.append([41]).sample(GREEDY).token_ids
        other.free()
        with pytest.raises(UsageError, match="one must be left"):
            branch.rollback(1000)
        wrong: Any
        for wrong in (-1, 1.0, True):
            with pytest.raises(UsageError, match="num_tokens must be"):
                branch.rollback(wrong)


def test_what_is_rolled_back_holds_no_block(llm: LLM) -> None:
    with llm.branch(list(range(40, 52))) as branch:
        branch.sample(GREEDY)
        assert llm.cache_stats().used_blocks == 5
        branch.rollback(10)
        assert llm.cache_stats().used_blocks == 2


def test_a_branch_outlives_the_loss_of_its_blocks(llm: LLM) -> None:
    with llm.branch(list(range(40, 52))) as branch:
        first = branch.sample(GREEDY)
        llm.generate([[60 + i % 9] * 100 for i in range(6)], GREEDY)
        llm.reset_prefix_cache()
        branch.rollback(6)
        assert branch.sample(GREEDY).token_ids == first.token_ids


def test_misuse_is_explained(llm: LLM) -> None:
    branch = llm.branch("hello")
    with pytest.raises(UsageError, match="n=1"):
        branch.sample(SamplingParams(n=2))
    with pytest.raises(UsageError, match="no reasoning_depths"):
        branch.sample(SamplingParams(max_reasoning_tokens=2, reasoning_depths=[1]))
    with pytest.raises(UsageError, match="not by beam search"):
        branch.sample(BeamSearchParams())  # type: ignore[arg-type]
    odd: list[Any] = [[], 3, {}]
    for each in odd:
        with pytest.raises(UsageError, match="sampling parameters"):
            branch.sample(each)
    with pytest.raises(UsageError, match="sampling parameters"):
        llm.beam_search("the", [])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="twice"):
        llm.sample([branch, branch], GREEDY)
    for method in (llm.sample, llm.next_logprobs):
        with pytest.raises(UsageError, match=r"a list of branches, not <Branch: \d+ tokens>"):
            method(branch)  # type: ignore[arg-type]
    for count in (1000, -2, None, "5"):
        with pytest.raises(UsageError, match="count must be"):
            branch.logprobs(count)  # type: ignore[arg-type]
    before = list(branch.token_ids)
    for wrong, said in (
        ([10**9], "token id"),
        ("x" * 90_000, "context holds"),
        (None, "not NoneType"),
        (b"x", "not bytes"),
    ):
        with pytest.raises(UsageError, match=said):
            branch.append(wrong)  # type: ignore[arg-type]
    assert branch.token_ids == before
    branch.free()
    branch.free()
    with pytest.raises(UsageError, match="freed"):
        branch.fork()


def test_no_other_thread_takes_the_blocks_of_a_new_pin(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = idle_sequences.hold

    def hold_while_another_thread_needs_blocks(*arguments: Any) -> Any:
        found = hold(*arguments)
        while llm.engine.scheduler.idle.evict():
            pass
        return found

    monkeypatch.setattr(idle_sequences, "hold", hold_while_another_thread_needs_blocks)
    pinned = llm.pin(list(range(40, 60)))
    assert llm.cache_stats().used_blocks == 5
    llm.unpin(pinned)


def test_pins_are_kept_and_let_go(llm: LLM) -> None:
    pinned = llm.pin(list(range(40, 60)))
    assert llm.cache_stats().used_blocks == 5
    assert llm.generate([[*range(40, 60), 7]], GREEDY)[0].num_cached_tokens == 20
    with pytest.raises(MinillmError, match="pinned"):
        llm.pin([70] * 150)
    llm.unpin(pinned)
    llm.unpin(pinned)  # nothing is left to do
    with pytest.raises(UsageError, match="unpin takes what pin has returned, not str"):
        llm.unpin("a prompt")  # type: ignore[arg-type]
    assert "sequence" not in repr(pinned)


def test_branches_and_pins_of_another_model_are_rejected(llm: LLM, tiny_model: Path) -> None:
    with LLM(str(tiny_model), device="cpu", num_blocks=64, block_size=4) as other, other.branch("hello") as branch:
        branch.sample(GREEDY)
        pinned = other.pin(list(range(40, 60)))
        for method in (llm.sample, llm.next_logprobs):
            with pytest.raises(UsageError, match="belongs to another LLM"):
                method([branch])
        with pytest.raises(UsageError, match="pinned in another LLM"):
            llm.unpin(pinned)
        assert other.cache_stats().pinned_blocks == 5


def test_a_miss_is_explained_in_words(llm: LLM) -> None:
    ids = list(range(40, 60))
    llm.generate([ids], GREEDY)
    report = llm.explain_miss([*ids[:10], 90, *ids[11:]])
    cached, given = (llm.get_tokenizer().decode([each]) for each in (50, 90))
    assert cached != given
    assert f"has {cached!r} (token 50) where the prompt has {given!r} (token 90)" in str(report)


def test_a_beam_search_streams_its_best_beam(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    deltas = list(llm.stream("hello", params))
    final = llm.beam_search("hello", params)[0].outputs[0]
    assert all(delta.replaces for delta in deltas)
    assert deltas[-1].finish_reason == final.finish_reason == "length"
    assert deltas[-1].token_ids == final.token_ids
    assert deltas[-1].text == final.text


def test_stop_strings_end_beams(llm: LLM) -> None:
    plain = llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))[0].outputs[0].text
    stop = plain[3:5]
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True, stop=stop)
    for beam in llm.beam_search("hello", params)[0].outputs:
        assert stop not in beam.text
        assert beam.finish_reason == ("stop" if beam.stop_reason == stop else "length")


def test_a_stop_token_is_not_part_of_a_beams_text(llm: LLM) -> None:
    shape: dict[str, Any] = {"beam_width": 3, "max_tokens": 8, "length_penalty": 0.0, "ignore_eos": True}
    [plain] = llm.beam_search("hello", BeamSearchParams(**shape))
    token = next(each for each in plain.outputs[0].token_ids[2:] if llm.tokenizer.token_bytes(each))
    [output] = llm.beam_search("hello", BeamSearchParams(**shape, stop_token_ids=[token]))
    ended = [beam for beam in output.outputs if beam.finish_reason == "stop"]
    assert ended
    for beam in ended:
        stream = llm.tokenizer.detokenizer(output.prompt_token_ids)
        assert beam.token_ids[-1] == beam.stop_reason == token
        assert beam.text == "".join(map(stream.push, beam.token_ids[:-1])) + stream.finish()


def test_a_branch_of_sentencepiece_text_goes_on_within_a_word(tmp_path: Path) -> None:
    llm = LLM(str(write_sentencepiece_model(tmp_path)), device="cpu", num_blocks=64)
    with llm.branch("the qu") as branch:
        assert branch.append("ick").append(" brown").text == "the quick brown"
        assert branch.token_ids[-1:] == llm.token_ids("the quick brown")[-1:]
    params = SamplingParams(bad_words=["quick"], max_tokens=1)
    banned = bad_word_ids(params, llm.tokenizer)
    assert sorted(map(llm.tokenizer.decode, [(1, 300, *run) for run in banned])) == sorted(
        llm.tokenizer.decode([1, 300]) + each for each in ("quick", " quick")
    )


def test_without_parameters_those_of_the_model_apply(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "defaults", {"temperature": 0, "max_tokens": 3, "ignore_eos": True})
    with llm.branch([5, 6, 7]) as branch, branch.fork() as other:
        assert len(branch.sample().token_ids) == 3
        assert llm.sample([other])[0].token_ids == branch.token_ids[3:]
