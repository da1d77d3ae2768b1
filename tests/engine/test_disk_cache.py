"""The disk cache in an engine: a later process answers as one that never stopped."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.engine import engine_for, everything_is_back, tier_of
from lib.models import hf_model, noisy, ours
from minillm import LLM, SamplingParams
from minillm.blockstore.files import listed
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.engine import Engine
from minillm.errors import UsageError
from minillm.model.llama import Llama
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams
from minillm.runner import block_reads
from minillm.runner.block_reads import BlockReader
from minillm.runner.pool_blocks import PoolBlocks
from minillm.system import child_environment

PROMPT = [3 + (7 * i) % 90 for i in range(41)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2)


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours(hf_model())


def answer(engine: Engine, prompt: list[int], params: Any = GREEDY, **options: Any) -> RequestOutput:
    engine.add_request("one", prompt, params, **options)
    while engine.has_work:
        engine.step()
    [output] = engine.take_finished()
    assert output.error is None, output.error
    return output


@contextmanager
def process(model: Llama, disk: Path, **options: Any) -> Iterator[Engine]:
    """Yield the engine of a new process with this disk cache."""
    engine = engine_for(model, disk=disk, **options)
    yield engine
    tier_of(engine).close()
    everything_is_back(engine)


def same(one: RequestOutput, other: RequestOutput) -> None:
    assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
    scores = [each.cumulative_logprob for each in other.outputs]
    assert [each.cumulative_logprob for each in one.outputs] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_conversation_goes_on_after_a_restart(
    model: Llama, tmp_path: Path, on_device: bool, eight_bits: bool
) -> None:
    model = replace(model, kv_in_8_bits=eight_bits)
    with process(model, tmp_path, on_device=on_device) as engine:
        first = answer(engine, PROMPT)
        grown = [*PROMPT, *first.outputs[0].token_ids, 50, 60, 70]
        never_stopped = answer(engine, grown)
    with process(model, tmp_path, on_device=on_device) as engine:
        output = answer(engine, grown)
        assert output.metrics is not None
        assert output.metrics.num_disk_tokens == output.num_cached_tokens == 48
        assert output.metrics.disk_seconds > 0
        same(output, never_stopped)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(n=3, seed=1, max_tokens=9, logprobs=0), BeamSearchParams(beam_width=3, max_tokens=7)],
)
def test_samples_and_beams_fork_from_blocks_of_the_disk(model: Llama, tmp_path: Path, params: Any) -> None:
    with process(model, tmp_path) as engine:
        expected = answer(engine, PROMPT, params)
    with process(model, tmp_path) as engine:
        output = answer(engine, PROMPT, params)
        assert output.num_cached_tokens == 40
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]


@pytest.mark.parametrize("eight_bits", [False, True])
def test_the_partly_filled_block_of_a_kept_conversation_comes_back(
    model: Llama, tmp_path: Path, eight_bits: bool
) -> None:
    model = replace(model, kv_in_8_bits=eight_bits)
    with process(model, tmp_path, block_size=16) as engine:
        group = engine.add_request("kept", PROMPT, GREEDY, hold=True, owner="conversation")
        while engine.has_work:
            engine.step()
        [first] = engine.take_finished()
        grown = [*PROMPT, *first.outputs[0].token_ids, 50]
        idle_sequences.release(Driver(engine), group.sequences[0])
        expected = answer(engine, grown)
    with process(model, tmp_path, block_size=16) as engine:
        output = answer(engine, grown)
        assert output.num_cached_tokens == len(PROMPT) + 7, "all but the last token of the answer, which has no K and V"
        same(output, expected)
        tier_of(engine).erase("conversation")
    with process(model, tmp_path, block_size=16) as engine:
        assert answer(engine, grown).num_cached_tokens == 0


def test_a_pool_too_small_evicts_preempts_and_still_answers_alike(model: Llama, tmp_path: Path) -> None:
    prompts = [[*PROMPT[:20], *(number + 3 for number in range(i, i + 15))] for i in range(0, 30, 5)]
    with process(model, tmp_path, num_blocks=128) as engine:
        expected = [answer(engine, prompt) for prompt in prompts]
    for host_blocks in (0, 30):
        with process(model, tmp_path, num_blocks=24, host_blocks=host_blocks, admission="optimistic") as engine:
            for number, prompt in enumerate(prompts):
                engine.add_request(str(number), prompt, GREEDY)
            while engine.has_work:
                engine.step()
            found = {output.request_id: output for output in engine.take_finished()}
            for number, output in enumerate(expected):
                same(found[str(number)], output)
            assert tier_of(engine).num_read > 0


def test_others_go_on_while_a_prompt_is_read(model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with process(model, tmp_path) as engine:
        expected = answer(engine, PROMPT)
    with process(model, tmp_path) as engine:
        tier = tier_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(tier.reader, "is_done", lambda read: False)
            engine.add_request("read", PROMPT, GREEDY)
            engine.add_request("other", [9, 8, 7], GREEDY)
            finished: list[RequestOutput] = []
            while not finished:
                engine.step()
                finished = engine.take_finished()
            assert [output.request_id for output in finished] == ["other"]
        while engine.has_work:
            engine.step()
        same(engine.take_finished()[0], expected)


def test_a_saved_prompt_waits_for_the_blocks_of_a_read(
    model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt begins with pinned blocks. Once it is saved in host memory, it needs blocks of its own instead."""
    prompt = [9] * 40 + [7] * 70
    with process(model, tmp_path) as engine:
        answer(engine, PROMPT)
        expected = answer(engine, prompt, owner="")
    sizes: dict[str, Any] = {"num_blocks": 45, "host_blocks": 40, "max_num_batched_tokens": 32}
    with process(model, tmp_path, **sizes, admission="optimistic") as engine:
        pinned = engine.add_request("pinned", prompt[:41], SamplingParams(max_tokens=1), hold=True).sequences[0]
        while engine.has_work:
            engine.step()
        idle_sequences.pin(Driver(engine), pinned)
        for name, each in (("read", PROMPT), ("first", [8] * 23), ("saved", prompt)):
            engine.add_request(name, each, GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(tier_of(engine).reader, "is_done", lambda read: False)
            for _ in range(20):
                engine.step()
        while engine.has_work:
            engine.step()
        [output] = [each for each in engine.take_finished() if each.request_id == "saved"]
        assert output.metrics is not None
        assert output.metrics.num_preemptions > 0
        same(output, expected)
        idle_sequences.unpin(Driver(engine), pinned)


def test_evicted_blocks_are_saved_before_a_read_takes_their_place(
    model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PROMPT[:10:-1]
    with process(model, tmp_path) as engine:
        answer(engine, PROMPT)
        expected = answer(engine, other, owner="")
    with process(model, tmp_path, num_blocks=14) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(tier_of(engine), "_free", lambda: 0)  # the writer's queue is full
            answer(engine, other)
        answer(engine, PROMPT)  # no step runs during the read
    with process(model, tmp_path) as engine:
        output = answer(engine, other)
        assert output.num_cached_tokens == 28
        same(output, expected)


def test_a_later_piece_does_not_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are used in order. The engine's thread would otherwise run steps without work, next to the readers."""
    first, waited = threading.Event(), list[Any]()
    pool = PoolBlocks([torch.zeros(1, 2, 16, 4, 1, 2)], 4)
    reader = BlockReader[int](pool, lambda key, buffers: key > 0 or first.wait(60), {})
    read = reader.prepare(range(16), list(range(16)))
    reader.start()
    assert read.pieces[1][1].result() == 8
    with monkeypatch.context() as patch:
        patch.setattr(block_reads, "wait", lambda futures, *rest: waited.extend(futures))
        reader.wait([read], 60)
    assert waited == [read.pieces[0][1]]
    first.set()
    while not reader.is_done(read):
        reader.wait([read], 60)
    assert read.num_read == 16
    reader.close()


def test_an_abort_ends_a_read(model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with process(model, tmp_path) as engine:
        answer(engine, PROMPT)
    with process(model, tmp_path) as engine:
        monkeypatch.setattr(tier_of(engine).reader, "is_done", lambda read: False)
        engine.add_request("read", PROMPT, GREEDY)
        engine.step()
        assert engine.scheduler.admission.disk_reads is not None
        assert engine.scheduler.admission.disk_reads.active
        engine.abort("read")
        engine.step()
        assert not engine.has_work


def test_a_damaged_block_ends_the_part_that_is_read(model: Llama, tmp_path: Path) -> None:
    with process(model, tmp_path) as engine:
        expected = answer(engine, PROMPT)
    for index in (5, 0):
        [path] = [Path(block.path) for block in listed(tmp_path) if block.index == index]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with process(model, tmp_path) as engine:
            output = answer(engine, PROMPT)
            assert output.num_cached_tokens == 4 * index
            same(output, expected)


def test_nan_never_reaches_the_disk(tmp_path: Path) -> None:
    weights = hf_model()
    with torch.no_grad():
        weights.model.layers[0].self_attn.v_proj.weight[0, 0] = float("nan")
    with process(ours(weights), tmp_path) as engine:
        engine.add_request("one", PROMPT, GREEDY)
        while engine.has_work:
            engine.step()
        assert "NaN" in str(engine.take_finished()[0].error)
    assert list(listed(tmp_path)) == []


def test_a_failed_request_leaves_no_partly_filled_block(
    model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(model, tmp_path) as engine:
        monkeypatch.setattr(engine.runner, "draw", None)
        engine.add_request("one", PROMPT[:3], GREEDY, hold=True, owner="conversation")
        with pytest.raises(TypeError):
            engine.step()
    assert list(listed(tmp_path)) == []


def test_private_requests_leave_no_block(model: Llama, tmp_path: Path) -> None:
    with process(model, tmp_path) as engine:
        answer(engine, PROMPT, owner="")
    assert list(listed(tmp_path)) == []


def test_a_salt_is_part_of_the_key(model: Llama, tmp_path: Path) -> None:
    with process(model, tmp_path) as engine:
        answer(engine, PROMPT, salt="one")
    with process(model, tmp_path) as engine:
        assert answer(engine, PROMPT).num_cached_tokens == 0
        assert answer(engine, PROMPT, salt="other").num_cached_tokens == 0
    with process(model, tmp_path) as engine:
        assert answer(engine, PROMPT, salt="one").num_cached_tokens == 40


def test_a_draft_model_computes_blocks_of_the_disk_itself(tmp_path: Path) -> None:
    weights = hf_model()
    target, draft = ours(weights), noisy(weights, 0.1)
    with process(target, tmp_path, draft=draft) as engine:
        expected = answer(engine, PROMPT)
    with process(target, tmp_path, draft=draft) as engine:
        answer(engine, list(range(20, 90)))  # the draft model knows the pool's blocks with other content
        engine.cache.reset_prefix_cache()
        output = answer(engine, PROMPT)
        assert output.num_cached_tokens == 40
        same(output, expected)


def test_an_llm_finds_the_blocks_of_an_earlier_one(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MINILLM_DISK_CACHE", str(tmp_path))
    monkeypatch.setattr(BlockReader, "measure", lambda self, step: None)  # read whatever is on disk
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "disk_cache": "1GB"}
    prompt = list(range(10, 60))
    with LLM(str(tiny_model), **options) as llm:
        [expected] = llm.generate(prompt, GREEDY)
    with LLM(str(tiny_model), **options) as llm:
        [output] = llm.generate(prompt, GREEDY)
        assert output.num_cached_tokens == 48
        same(output, expected)
    for other in ({"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"block_size": 8}):
        with LLM(str(tiny_model), **{**options, **other}) as llm:
            assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0, other


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disk_cache": "much"}, "disk_cache must be a size like 12GiB"),
        ({"disk_cache": -1}, "disk_cache must be at least 0"),
        ({"disk_cache": "1GB", "enable_prefix_caching": False}, "disk_cache needs prefix caching"),
    ],
)
def test_a_wrong_disk_cache_is_reported(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        LLM("smollm2-135m", **options)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills_lose_no_block_and_no_token(tmp_path: Path) -> None:
    """The program has no threads, so that it can fork engines."""
    command = [sys.executable, "-m", "lib.engine_kills", str(tmp_path), "1000", "1"]
    environment = {**child_environment(), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, check=True)
