"""Test ``max_reasoning_tokens`` in every way of decoding, against whole outputs and plain requests."""

from __future__ import annotations

import random
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.engine import engine_for, run
from lib.models import hf_model, ours, write_sentencepiece_model, write_tiny_model
from lib.speculation import counting_model, guesses_of
from lib.tokens import THINKING
from minillm import LLM, BeamSearchParams, Grammar, SamplingParams
from minillm.cache import check
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.errors import UsageError
from minillm.model.llama import Llama
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.sequence import Schedule
from minillm.text.reasoning_budget import CLOSED, CLOSING
from minillm.text.tokenizer import Tokenizer

PATTERN = r"[a-c]{2,9}x"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def parts(directory: Path) -> tuple[Llama, Tokenizer]:
    return ours(hf_model(vocab_size=640, max_position_embeddings=512)), Tokenizer.from_directory(directory)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def engine(parts: tuple[Llama, Tokenizer], **options: Any) -> Engine:
    model, tokenizer = parts
    assert tokenizer.eos_token_id is not None
    sizes: dict[str, Any] = {"num_blocks": 1000, "max_num_seqs": 128, **options}
    return engine_for(model, tokenizer=tokenizer, eos=frozenset({tokenizer.eos_token_id}), **sizes)


def thought_and_answer(tokenizer: Tokenizer, output: CompletionOutput, limit: int, is_open: bool) -> tuple[int, str]:
    """Return the tokens of thought and the text of the answer, after checking that the limit was kept exactly."""
    [opening], [closing] = ids_of(tokenizer, "<think>"), ids_of(tokenizer, "</think>")
    ids = list(output.token_ids)
    if not is_open:
        first = next((i for i, each in enumerate(ids) if tokenizer.token_bytes(each).strip() or each == opening), None)
        if first is None or ids[first] != opening:
            return 0, tokenizer.decode(ids)  # its text may begin with the rest of a character of the prompt
        ids = ids[first + 1 :]
    length = ids.index(closing) if closing in ids else len(ids)
    forced = ids_of(tokenizer, CLOSING if limit else CLOSED)
    if length < limit or (length == limit and (len(ids) == limit or ids[limit] == closing != forced[0])):
        return length, tokenizer.decode(ids[length + 1 :])
    after = ids[limit : limit + len(forced)]
    assert after == forced[: len(after)], "the limit is not exact"
    assert len(after) == len(forced) or output.finish_reason != "stop"
    return limit, tokenizer.decode(ids[limit + len(forced) :])


def request(rng: random.Random, tokenizer: Tokenizer, number: int) -> tuple[list[int], Any, bool]:
    """Return a prompt, parameters, and whether the prompt has opened the thought."""
    is_open = rng.random() < 0.7
    prompt = [rng.randrange(10, 500) for _ in range(rng.randint(1, 30))]
    prompt += ids_of(tokenizer, "<think>\n") if is_open else []
    [opening], [closing] = ids_of(tokenizer, "<think>"), ids_of(tokenizer, "</think>")
    shared: dict[str, Any] = {
        "max_reasoning_tokens": rng.choice([0, 1, 2, 7, rng.randint(3, 25)]),
        "max_tokens": rng.randint(50, 80),
        "logit_bias": {closing: rng.choice([-100.0, 15.0, 25.0]), opening: 0.0 if is_open else 30.0},
        "grammar": Grammar.regex(PATTERN) if rng.random() < 0.3 else None,
        "ignore_eos": False,
    }
    if rng.random() < 0.25:
        return prompt, BeamSearchParams(beam_width=rng.randint(1, 4), **shared), is_open
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.2},
        {"n": rng.randint(1, 4), "top_p": 0.9, "frequency_penalty": rng.choice([0.0, 0.5])},
        {"min_tokens": 28, "allowed_token_ids": [*range(20, 400), opening, closing]},
    ]
    return prompt, SamplingParams(seed=number, **{**shared, **rng.choice(sampling)}), is_open


def check_outputs(
    tokenizer: Tokenizer, requests: list[tuple[list[int], Any, bool]], outputs: list[RequestOutput]
) -> tuple[int, int]:
    """Return how many thoughts ended at their limit, and how many before it."""
    num_cut = num_short = 0
    for (_, params, is_open), output in zip(requests, outputs, strict=True):
        if output.error is not None:  # the allowed tokens and the grammar may exclude each other
            assert params.grammar is not None
            continue
        for each in output.outputs:
            limit = params.max_reasoning_tokens
            count, answer = thought_and_answer(tokenizer, each, limit, is_open)
            assert each.reasoning_tokens == count
            num_cut += count == limit
            num_short += count < limit
            if params.grammar is not None and each.finish_reason == "stop":
                assert re.fullmatch(PATTERN, answer), each.text
    return num_cut, num_short


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "device": {"on_device": True},
    "device-drafts": {"on_device": True, "speculate": "lookup"},
    "drafts": {"speculate": "lookup"},
    "recompute": {"num_blocks": 100, "admission": "optimistic"},
    "swap": {"num_blocks": 100, "host_blocks": 40, "admission": "optimistic", "on_device": True},
}


def random_runs(parts: tuple[Llama, Tokenizer], seed: int, count: int, **way: Any) -> tuple[int, int]:
    rng, tokenizer = random.Random(seed), parts[1]
    requests = [request(rng, tokenizer, number) for number in range(count)]
    running = engine(parts, **way)
    outputs = run(running, [(prompt, params) for prompt, params, _ in requests])
    assert (running.scheduler.preemption.count > 0) == ("admission" in way)
    return check_outputs(tokenizer, requests, outputs)


@pytest.mark.parametrize("way", WAYS)
def test_the_limit_is_exact(parts: tuple[Llama, Tokenizer], way: str) -> None:
    num_cut, num_short = random_runs(parts, 0, 12, **WAYS[way])
    assert num_cut > 5
    assert num_short > 1


@pytest.mark.soak
def test_the_limit_is_exact_in_a_thousand_runs(parts: tuple[Llama, Tokenizer]) -> None:
    for number in range(42):
        random_runs(parts, 1 + number, 24, **[*WAYS.values()][number % len(WAYS)])


@pytest.mark.parametrize("way", list(WAYS)[:4])
def test_a_limited_run_is_the_same_as_plain_runs_in_a_row(parts: tuple[Llama, Tokenizer], way: str) -> None:
    """First the thought, as of a request without a limit; then the answer to a prompt that ends with the closing."""
    tokenizer = parts[1]
    prompt = [5, 9, 60, *ids_of(tokenizer, "<think>\n")]
    for number, limit in enumerate((1, 4, 17)):
        drawn: dict[str, Any] = {"seed": number, "temperature": 0.8, "ignore_eos": True, "logprobs": 0}
        plain = SamplingParams(max_tokens=limit, **drawn)
        [first] = run(engine(parts), [(prompt, plain)])
        before = first.outputs[0].token_ids + ids_of(tokenizer, CLOSING)
        [second] = run(engine(parts), [(prompt + before, SamplingParams(max_tokens=9, **drawn))])
        params = SamplingParams(max_reasoning_tokens=limit, max_tokens=len(before) + 9, **drawn)
        [output] = run(engine(parts, **WAYS[way]), [(prompt, params)])
        assert output.outputs[0].token_ids == before + second.outputs[0].token_ids
        assert output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


def test_accepted_drafts_stop_at_the_limit(parts: tuple[Llama, Tokenizer]) -> None:
    """The model counts, and the prompt has counted before: draft tokens are accepted up to the limit."""
    tokenizer = parts[1]
    counting = counting_model(vocab_size=640, max_position_embeddings=512), tokenizer
    [last] = ids_of(tokenizer, "\n")
    prompt = [*range(last, last + 60), *ids_of(tokenizer, "<think>\n")]
    closing = ids_of(tokenizer, CLOSING)
    for limit in (20, 21, 22, 23):
        running = engine(counting, speculate="lookup")
        params = SamplingParams(temperature=0, max_tokens=limit + len(closing), max_reasoning_tokens=limit)
        [output] = run(running, [(prompt, params)])
        assert output.outputs[0].token_ids == [*range(last + 1, last + 1 + limit), *closing]
        assert guesses_of(running).num_accepted > 10


def test_a_grammar_leaves_the_thought_alone(parts: tuple[Llama, Tokenizer]) -> None:
    tokenizer = parts[1]
    prompt = [5, 9, 60, *ids_of(tokenizer, "<think>\n")]
    params = SamplingParams(seed=3, max_tokens=90, max_reasoning_tokens=12, ignore_eos=True)
    bound = replace(params, grammar=Grammar.regex(PATTERN))
    [plain, restricted] = run(engine(parts), [(prompt, params), (prompt, bound)])
    length = 12 + len(ids_of(tokenizer, CLOSING))
    assert restricted.outputs[0].token_ids[:length] == plain.outputs[0].token_ids[:length]
    assert re.fullmatch(PATTERN, tokenizer.decode(restricted.outputs[0].token_ids[length:]))


def test_forced_tokens_cost_a_beam_nothing(parts: tuple[Llama, Tokenizer]) -> None:
    tokenizer = parts[1]
    prompt = [5, 9, 60, *ids_of(tokenizer, "<think>\n")]
    closing = ids_of(tokenizer, CLOSED)
    params = BeamSearchParams(beam_width=3, max_tokens=len(closing) + 5, max_reasoning_tokens=0, ignore_eos=True)
    [output] = run(engine(parts), [(prompt, params)])
    plain = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    [expected] = run(engine(parts), [(prompt + closing, plain)])
    for one, other in zip(output.outputs, expected.outputs, strict=True):
        assert one.token_ids == closing + other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def test_a_processor_is_not_asked_about_forced_tokens(parts: tuple[Llama, Tokenizer]) -> None:
    tokenizer, asked = parts[1], []

    def processor(prompt: list[int], output: list[int], logits: Any) -> Any:
        asked.append(len(output))
        return logits

    prompt = [5, *ids_of(tokenizer, "<think>\n")]
    closing = ids_of(tokenizer, CLOSING)
    params = SamplingParams(
        temperature=0, max_tokens=3 + len(closing) + 2, max_reasoning_tokens=3, logits_processor=processor
    )
    run(engine(parts), [(prompt, params)])
    assert asked == [0, 1, 2, 3 + len(closing), 4 + len(closing)]


def test_a_branch_inside_a_thought_is_limited(directory: Path) -> None:
    with LLM(str(directory), device="cpu", num_blocks=200) as llm:
        prompt, closing = ids_of(llm.tokenizer, "Hello<think>\nHm"), ids_of(llm.tokenizer, CLOSING)
        branch, count = llm.branch(prompt), 5 + len(closing) + 3
        other = branch.fork().append(ids_of(llm.tokenizer, "</think>"))
        params = SamplingParams(temperature=0, max_tokens=count, max_reasoning_tokens=5, ignore_eos=True)
        inside, outside = llm.sample([branch, other], params)
        assert inside.token_ids[5:-3] == closing
        assert (inside.reasoning_tokens, outside.reasoning_tokens) == (5, 0)
        assert len(outside.token_ids) == count


def test_tags_of_several_tokens(tmp_path: Path) -> None:
    """The template tells that the model thinks, and its vocabulary has no tags."""
    write_sentencepiece_model(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    tokenizer.use_template(THINKING)
    model = ours(hf_model(vocab_size=640, max_position_embeddings=512))
    prompt = tokenizer.encode("Hi<think>", parse_special=True)
    params = SamplingParams(temperature=0, max_tokens=60, max_reasoning_tokens=6, ignore_eos=True)
    [output] = run(engine_for(model, tokenizer=tokenizer, num_blocks=100), [(prompt, params)])
    text = tokenizer.decode(output.outputs[0].token_ids[6:])
    assert text.lstrip("\n ").startswith(CLOSING.strip())
    assert output.outputs[0].reasoning_tokens == 6


def test_a_model_without_tags_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_sentencepiece_model(tmp_path))
    model = ours(hf_model(vocab_size=640))
    with pytest.raises(UsageError, match="max_reasoning_tokens: this model has no <think>"):
        engine_for(model, tokenizer=tokenizer).add_request("a", [5], SamplingParams(max_reasoning_tokens=3))
    with pytest.raises(UsageError, match="max_reasoning_tokens: this model has no <think>"):
        engine_for(model).add_request("a", [5], SamplingParams(max_reasoning_tokens=3))
    with pytest.raises(UsageError, match="max_reasoning_tokens must be"):
        SamplingParams(max_reasoning_tokens=-1)


# --- answers at several depths ----------------------------------------------------------------------------------------


def assert_like_separate_runs(parts: tuple[Llama, Tokenizer], seed: int, way: dict[str, Any]) -> int:
    """Compare the answers at several depths with runs of these limits. Return how many depths were reached."""
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
    reached = 0
    for (prompt, params, _, depths), output in zip(requests, outputs, strict=True):
        assert [each.index for each in output.outputs] == list(range(len(depths)))
        alone = [(prompt, replace(params, max_reasoning_tokens=depth)) for depth in depths]
        for one, separate in zip(output.outputs, run(engine(parts), alone), strict=True):
            [other] = separate.outputs
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
            assert (one.finish_reason, one.reasoning_tokens) == (other.finish_reason, other.reasoning_tokens)
            logprobs = [[token.logprob for token in each.logprobs or []] for each in (one, other)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
        reached += output.outputs[-1].reasoning_tokens > depths[0]
    return reached


@pytest.mark.parametrize("way", ["plain", "device-drafts", "swap"])
def test_answers_at_several_depths_are_those_of_separate_runs(parts: tuple[Llama, Tokenizer], way: str) -> None:
    assert assert_like_separate_runs(parts, 0, WAYS[way])


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
            if number == step:  # what `Scheduler._make_room` does when blocks run out
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
    assert together == alone + sum(own) - 1  # the first answer begins with the logits of the prompt
    assert all(each.finish_reason == "stop" for each in outputs)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_six_depths_compute_a_tenth_more_than_the_deepest_alone() -> None:
    """The tokenizer spells the closing sentence letter by letter, so the words of real tokenizers are counted."""
    directory = Path(tempfile.mkdtemp())
    tokenizer = Tokenizer.from_directory(write_tiny_model(directory))
    parts = ours(hf_model(vocab_size=640, max_position_embeddings=9000)), tokenizer
    prompt = ids_of(tokenizer, "Count<think>\n")
    depths = [256 << number for number in range(6)]
    sizes: dict[str, Any] = {"num_blocks": 3600, "block_size": 16, "prefix_caching": False}
    told = SamplingParams(max_reasoning_tokens=depths[-1], max_tokens=8900, **scripted(tokenizer, 100))
    alone, _ = num_computed(engine(parts, **sizes), prompt, told)
    together, _ = num_computed(engine(parts, **sizes), prompt, replace(told, reasoning_depths=depths[:-1]))
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
        with pytest.raises(UsageError, match="max_tokens is 150; it must be above"):
            llm.depths(prompt, [200], params)
        with pytest.raises(UsageError, match="n must be 1"):
            llm.depths(prompt, [3, 5], replace(params, n=2))
        with pytest.raises(UsageError, match="depths must be a list"):
            llm.depths(prompt, [], params)
