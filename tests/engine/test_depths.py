"""Test answers at several depths of one reasoning, against separate requests with these limits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.cache_checks import check
from lib.engine import run
from lib.kernels import ON_GPU
from lib.models import hf_model, ours, write_tiny_model
from lib.reasoning import WAYS, engine, ids_of, request
from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.errors import CapacityError, UsageError
from minillm.kernels.deterministic import OPS
from minillm.model.llama import Llama
from minillm.outputs import CompletionOutput
from minillm.sequence import Schedule
from minillm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def parts(directory: Path) -> tuple[Llama, Tokenizer]:
    return ours(hf_model(vocab_size=640, max_position_embeddings=512)), Tokenizer.from_directory(directory)


def assert_like_separate_runs(
    parts: tuple[Llama, Tokenizer], seed: int, way: dict[str, Any], tolerance: float = 1e-4
) -> int:
    """Compare the answers at several depths with runs of these limits. Return how many depths were reached.

    ``tolerance``: of log-probabilities.
    """
    rng, tokenizer = random.Random(seed), parts[1]
    requests = []
    for number in range(8):
        prompt, params, is_open = request(rng, tokenizer, number)
        while isinstance(params, BeamSearchParams) or params.n > 1:
            prompt, params, is_open = request(rng, tokenizer, number)
        depths = sorted(rng.sample(range(26), rng.randint(2, 4)))
        params = replace(params, logprobs=1, max_reasoning_tokens=None)
        requests.append((prompt, params, is_open, depths))
    running = engine(parts, **way)
    outputs = run(
        running,
        [
            (prompt, replace(params, max_reasoning_tokens=depths[-1], reasoning_depths=depths[:-1]))
            for prompt, params, _, depths in requests
        ],
    )
    if "admission" in way:
        assert running.scheduler.preemption.count > 0
    alone = [
        (prompt, replace(params, max_reasoning_tokens=depth))
        for prompt, params, _, depths in requests
        for depth in depths
    ]
    separate = iter(run(engine(parts), alone))
    reached = 0
    for (_, _, _, depths), output in zip(requests, outputs, strict=True):
        assert [each.index for each in output.outputs] == list(range(len(depths)))
        for one in output.outputs:
            [other] = next(separate).outputs
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
            assert (one.finish_reason, one.reasoning_tokens) == (other.finish_reason, other.reasoning_tokens)
            logprobs = [[token.logprob for token in each.logprobs or []] for each in (one, other)]
            assert logprobs[0] == pytest.approx(logprobs[1], rel=0, abs=tolerance)
        reached += output.outputs[-1].reasoning_tokens > depths[0]
    return reached


@pytest.mark.parametrize("way", ["plain", "device-drafts", "swap"])
def test_answers_at_several_depths_are_those_of_separate_runs(parts: tuple[Llama, Tokenizer], way: str) -> None:
    assert assert_like_separate_runs(parts, 0, WAYS[way])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_deterministic_mode_the_bits_are_those_of_separate_runs(
    parts: tuple[Llama, Tokenizer], dtype: torch.dtype
) -> None:
    model = ours(hf_model(vocab_size=640, max_position_embeddings=512), dtype=dtype)
    for seed in range(5):
        assert assert_like_separate_runs((replace(model, ops=OPS), parts[1]), seed, WAYS["plain"], tolerance=0) > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_six_depths_up_to_8192_tokens_have_the_bits_of_separate_runs(parts: tuple[Llama, Tokenizer]) -> None:
    tokenizer = parts[1]
    model = ours(hf_model(vocab_size=640, max_position_embeddings=9000), dtype=torch.bfloat16)
    prompt = ids_of(tokenizer, "Count<think>\n")
    depths = [256 << number for number in range(6)]
    scripted_params = {**scripted(tokenizer, 40), "temperature": 0.8, "seed": 5, "logprobs": 1}

    def completions(depths: list[int]) -> list[CompletionOutput]:
        params = SamplingParams(
            max_reasoning_tokens=depths[-1], max_tokens=8900, reasoning_depths=depths[:-1], **scripted_params
        )
        running = engine((replace(model, ops=OPS), tokenizer), num_blocks=3600, block_size=16)
        return run(running, [(prompt, params)])[0].outputs

    for depth, one in zip(depths, completions(depths), strict=True):
        [other] = completions([depth])
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
        assert len(one.token_ids) > depth + 40


def test_forks_of_a_request_that_is_just_being_swapped_out(
    parts: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request forks at each token of its thought, and is swapped out while its next token is on the device."""
    prompt = ids_of(parts[1], "Why<think>\n")
    params = SamplingParams(seed=1, max_tokens=14, max_reasoning_tokens=12, ignore_eos=True)
    depths = list(range(12))
    alone = [
        run(engine(parts), [(prompt, replace(params, max_reasoning_tokens=depth))])[0].outputs[0].token_ids
        for depth in (*depths, 12)
    ]
    for step in range(1, 14):
        running = engine(parts, num_blocks=200, host_blocks=200, on_device=True)
        running.add_request("0", prompt, replace(params, reasoning_depths=depths))
        outputs = []
        for number in range(200):
            if number == step:  # what `Scheduler._allocate_slots` does when blocks run out
                scheduler = running.scheduler

                def preempting(scheduler: Scheduler = scheduler) -> Schedule:
                    schedule, victim = Schedule(), scheduler.running.pop()
                    scheduler.waiting.appendleft(victim)
                    scheduler.preemption.take_out(victim, schedule)
                    return schedule

                monkeypatch.setattr(scheduler, "schedule", preempting)
            running.step()
            if number == step:
                monkeypatch.undo()
            outputs += running.take_finished()
            check(running.cache)
            if not running.has_work:
                break
        [output] = outputs
        assert output.error is None
        assert [each.token_ids for each in output.outputs] == alone


def test_too_many_depths_are_rejected_by_that_name(parts: tuple[Llama, Tokenizer]) -> None:
    params = SamplingParams(max_tokens=8, max_reasoning_tokens=4, reasoning_depths=[1, 2, 3])
    with pytest.raises(CapacityError, match=r"needs 4 sequences at a time \(n, beam_width or depths\)"):
        engine(parts, max_num_seqs=3).add_request("0", [10], params)
    with pytest.raises(CapacityError, match="lower max_tokens, ask for fewer sequences"):
        engine(parts, num_blocks=8).add_request("0", [10], params)


@pytest.mark.soak
def test_answers_at_random_depths_are_those_of_separate_runs(parts: tuple[Llama, Tokenizer]) -> None:
    for number in range(60):
        assert_like_separate_runs(parts, 1 + number, [*WAYS.values()][number % len(WAYS)])


def num_computed(running: Engine, prompt: list[int], params: SamplingParams) -> tuple[int, list[CompletionOutput]]:
    """Return the tokens that a request computes, prompt included, and its completions."""
    running.add_request("one", prompt, params)
    count = 0
    while running.has_work:
        running.step()
        if (step := running.figures.last_step) is not None:
            count += step.num_prefill_tokens + step.num_decodes
    [output] = running.take_finished()
    assert output.error is None
    return count, output.outputs


def scripted(tokenizer: Tokenizer, answer: int) -> dict[str, Any]:
    """Return parameters of a thought that never ends by itself, and of ``answer`` tokens after it."""
    [closing] = ids_of(tokenizer, "</think>")

    def script(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        said = logits.clone()
        said[closing] = -1e9
        is_over = closing in output and len(output) - output.index(closing) > answer
        said[tokenizer.eos_token_id] = 1e9 if is_over else -1e9
        return said

    return {"temperature": 0, "logits_processor": script}


def test_forks_of_a_thought_compute_only_their_own_tokens(parts: tuple[Llama, Tokenizer]) -> None:
    tokenizer = parts[1]
    prompt = ids_of(tokenizer, "Count<think>\n")
    told = SamplingParams(max_reasoning_tokens=64, max_tokens=200, **scripted(tokenizer, 9))
    alone, [deepest] = num_computed(engine(parts, prefix_caching=False), prompt, told)
    depths = (0, 4, 8, 16, 32)
    together, outputs = num_computed(
        engine(parts, prefix_caching=False), prompt, replace(told, reasoning_depths=depths)
    )
    assert outputs[-1] == replace(deepest, index=5)
    own = [len(each.token_ids) - depth for each, depth in zip(outputs[:-1], depths, strict=True)]
    more = together - (alone + sum(own) - 1)  # the first answer begins with the logits of the prompt
    assert 0 <= more <= (len(depths) if ON_GPU else 0), "a GPU computes a token more before the CPU has seen the last"
    assert all(each.finish_reason == "stop" for each in outputs)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_six_depths_compute_a_tenth_more_than_the_deepest_alone(parts: tuple[Llama, Tokenizer]) -> None:
    """The tokenizer spells the closing sentence letter by letter, so the words of real tokenizers are counted."""
    tokenizer = parts[1]
    long_parts = ours(hf_model(vocab_size=640, max_position_embeddings=9000)), tokenizer
    prompt = ids_of(tokenizer, "Count<think>\n")
    depths = [256 << number for number in range(6)]
    sizes: dict[str, Any] = {"num_blocks": 3600, "block_size": 16, "prefix_caching": False}
    told = SamplingParams(max_reasoning_tokens=depths[-1], max_tokens=8900, **scripted(tokenizer, 100))
    alone, _ = num_computed(engine(long_parts, **sizes), prompt, told)
    together, _ = num_computed(engine(long_parts, **sizes), prompt, replace(told, reasoning_depths=depths[:-1]))
    print(f"{together} tokens computed, {alone} alone: {together / alone:.3f}")
    assert together <= 1.10 * alone


def test_depths_of_an_llm(directory: Path) -> None:
    with LLM(str(directory), device="cpu", num_blocks=200) as llm:
        prompt = ids_of(llm.tokenizer, "Count<think>\n")
        params = SamplingParams(max_tokens=150, **scripted(llm.tokenizer, 9))
        answers = llm.depths(prompt, [8, 0, 20, 8], params)
        assert [each.depth for each in answers] == [8, 0, 20, 8]
        assert answers[0] == answers[3]
        for each in answers:
            [output] = llm.generate(prompt, replace(params, max_reasoning_tokens=each.depth))
            assert each.output.token_ids == output.outputs[0].token_ids
            assert output.text.partition("</think>")[2].lstrip() == each.text
            assert each.num_own_tokens == len(each.output.token_ids) - (each.depth if each.depth < 20 else 0)
        biased = replace(params, logits_processor=None, logit_bias={ids_of(llm.tokenizer, "</think>")[0]: 100.0})
        one, other = llm.depths(prompt, [3, 30], biased)
        assert (one.text, one.num_own_tokens) == (other.text, 0)
        conversation = [{"role": "user", "content": "Count"}]
        assert llm.depths(tuple(conversation), [0, 2], params) == llm.depths(conversation, [0, 2], params)
        with pytest.raises(UsageError, match="max_tokens is 150; it must be above"):
            llm.depths(prompt, [200], params)
        with pytest.raises(UsageError, match="n must be 1"):
            llm.depths(prompt, [3, 5], replace(params, n=2))
        with pytest.raises(UsageError, match="n must be 1"):
            llm.depths(prompt, [3], replace(params, n=2))
        with pytest.raises(UsageError, match="depths must be a list"):
            llm.depths(prompt, [], params)
