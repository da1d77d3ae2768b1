"""Test ``max_reasoning_tokens`` in every way of decoding, against whole outputs and plain requests."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib.engine import engine_for, run
from lib.models import hf_model, ours, write_sentencepiece_model, write_tiny_model
from lib.reasoning import PATTERN, WAYS, engine, ids_of, request
from lib.speculation import counting_model, guesses_of
from lib.tokens import THINKING
from minillm import LLM, BeamSearchParams, Grammar, SamplingParams
from minillm.errors import UsageError
from minillm.model.llama import Llama
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.text.reasoning import LeadingReasoning
from minillm.text.reasoning_budget import CLOSED, CLOSING, ReasoningTags, reasoning
from minillm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def parts(directory: Path) -> tuple[Llama, Tokenizer]:
    return ours(hf_model(vocab_size=640, max_position_embeddings=512)), Tokenizer.from_directory(directory)


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


def random_runs(parts: tuple[Llama, Tokenizer], seed: int, count: int, **way: Any) -> tuple[int, int]:
    rng, tokenizer = random.Random(seed), parts[1]
    requests = [request(rng, tokenizer, number) for number in range(count)]
    running = engine(parts, **way)
    outputs = run(running, [(prompt, params) for prompt, params, _ in requests])
    assert (running.scheduler.preemption.count > 0) == ("admission" in way)
    return check_outputs(tokenizer, requests, outputs)


def test_the_limit_and_the_server_see_a_thought_after_the_same_white_space(parts: tuple[Llama, Tokenizer]) -> None:
    tags = ReasoningTags.of(parts[1])
    assert tags is not None
    for space in filter(str.isspace, map(chr, range(0x3001))):
        text = f"{space}<think>a"
        count = reasoning(tags, ids_of(parts[1], text), is_open=False).count
        assert LeadingReasoning(inside=False).push(text) == [(count > 0, "a" if count else text)], ascii(space)


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


def test_a_token_in_both_tags_does_not_hide_the_closing_tag(parts: tuple[Llama, Tokenizer]) -> None:
    texts = [b"<think", b"></", b"think>", b" yes"]
    tags = ReasoningTags(parts[1], None, (), (), dict(enumerate(texts)))
    found = reasoning(tags, [0, 1, 2, 3, 3, 3], is_open=False)
    assert (found.first, found.count) == (2, 0)
