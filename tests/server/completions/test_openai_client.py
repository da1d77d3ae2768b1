"""Test the server with OpenAI's own client, and compare its answers with the engine's in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lib.server import Server
from minillm import LLM, SamplingParams


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), device="cpu", num_blocks=256)


MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it"}]


def test_a_chat_is_what_the_engine_says(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    ours = llm.chat(MESSAGES, SamplingParams(max_tokens=12, temperature=0))[0]
    assert answer.choices[0].message.content == ours.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ours.prompt_token_ids)
    assert answer.usage.completion_tokens == len(ours.outputs[0].token_ids)


def test_a_stream_joins_to_the_same_text(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1, seed=3, n=3)
    ours = [each.text for each in llm.chat(MESSAGES, params)[0].outputs]
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, seed=3, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", "", ""], None
    reasons: dict[int, str] = {}
    roles: dict[int, str | None] = {}
    for chunk in stream:
        assert usage is None, "the use of tokens comes last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles.setdefault(choice.index, choice.delta.role)
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == ours
    assert set(reasons.values()) <= {"stop", "length"}
    assert len(reasons) == 3
    assert set(roles.values()) == {"assistant"}
    assert usage is not None
    assert usage.completion_tokens <= 60


def test_log_probabilities(client: openai.OpenAI, llm: LLM) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    ours = llm.chat(MESSAGES, SamplingParams(max_tokens=5, temperature=0, logprobs=3))[0].outputs[0]
    assert ours.logprobs is not None
    content = answer.choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx([each.logprob for each in ours.logprobs], abs=1e-4)
    for each, own in zip(content, ours.logprobs, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx([value for _, value in own.top], abs=1e-4)
        assert bytes(each.bytes) == llm.tokenizer.token_bytes(own.token_id)


def test_completions_of_several_prompts(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [llm.token_ids("one two"), llm.token_ids("three")]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, echo=True, n=2)
    ours = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, n=2))
    texts = [llm.tokenizer.decode(each.prompt_token_ids) + out.text for each in ours for out in each.outputs]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_best_of_gives_the_most_probable(client: openai.OpenAI) -> None:
    one: Any = client.completions.create(model="tiny", prompt="a", max_tokens=4, n=8, seed=1, logprobs=1)
    best: Any = client.completions.create(model="tiny", prompt="a", max_tokens=4, n=2, best_of=8, seed=1, logprobs=1)
    means = sorted((sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in one.choices), reverse=True)
    got = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in best.choices]
    assert got == pytest.approx(means[:2], abs=1e-4)


def test_beams(client: openai.OpenAI, llm: LLM) -> None:
    from minillm import BeamSearchParams

    answer: Any = client.completions.create(
        model="tiny", prompt="a b", max_tokens=6, n=2, extra_body={"beam_width": 4, "length_penalty": 0.5}
    )
    ours = llm.beam_search("a b", BeamSearchParams(beam_width=4, n=2, max_tokens=6, length_penalty=0.5))[0]
    assert [choice.text for choice in answer.choices] == [each.text for each in ours.outputs]
    assert answer.choices[0].score == pytest.approx(ours.outputs[0].score, abs=1e-4)
    body = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5}
    same = client.completions.create(model="tiny", prompt="a b", max_tokens=6, n=2, temperature=0, extra_body=body)
    assert [choice.text for choice in same.choices] == [choice.text for choice in answer.choices]


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert client.models.retrieve(names[0]).id == names[0]
    with pytest.raises(openai.NotFoundError, match="not served here") as caught:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"n": 1000}, "n"),
        ({"extra_body": {"beam_width": 2}, "temperature": 0.5}, "temperature"),
        ({"extra_body": {"length_penalty": 2}}, "length_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"logit_bias": {"99999999": 1}}, None),
        ({"messages": [{"role": "wizard", "content": "x"}]}, None),
        ({"messages": []}, None),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: dict[str, object], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
    assert caught.value.param == param
    assert (param or "") in caught.value.message


def test_a_chat_that_is_much_too_long_is_not_tokenized(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="characters, but at most") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 1_000_000}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {"safety_identifier": "u1", "verbosity": "low", "service_tier": "flex", "prompt_cache_retention": "24h"},
        {"service_tier": "fast", "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"prediction": None, "web_search_options": None, "audio": None, "functions": None, "function_call": None},
        {"echo": None, "priority": None, "keep": None, "return_token_ids": None, "stream_options": None},
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None, "other": None}},
        {"top_logprobs": 0},
        {"messages": [MESSAGES[0], {"role": "user", "content": "Hi", "name": None, "weight": None}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Hi", "reasoning": "short"}, MESSAGES[1]]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": None}, "cache_control": None}]},
    ],
    ids=str,
)
def test_fields_that_clients_send_are_taken(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **fields}
    if "tools" in fields:
        body["tool_choice"] = "none"
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_no_limit_is_the_context(client: openai.OpenAI, field: str) -> None:
    of_default: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=5)
    fields: Any = {field: -1}
    answer: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=5, **fields)
    assert answer.choices[0].message.content == of_default.choices[0].message.content
    if field == "max_tokens":
        text: Any = client.completions.create(model="tiny", prompt="a", max_tokens=-1, seed=5)
        assert text.usage.completion_tokens > 16 or text.choices[0].finish_reason == "stop"


def test_a_seed_that_is_too_large_is_told_the_most(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="to 9223372036854775807, not 9223372036854775808"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1 << 63)


@pytest.mark.parametrize("count", [0, 2])
def test_the_drawn_token_is_among_the_most_probable(client: openai.OpenAI, count: int) -> None:
    """Check OpenAI's rule: the drawn token is always there, so there may be up to logprobs + 1 of them."""
    answer: Any = client.completions.create(
        model="tiny", prompt="a b", max_tokens=12, seed=3, logprobs=count, echo=True
    )
    found = answer.choices[0].logprobs
    for token, value, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[token] == value
        assert len(top) <= count + 1


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_a_stream_are_those_of_the_text(client: openai.OpenAI, echo: bool) -> None:
    fields: Any = {
        "model": "tiny",
        "prompt": ["a b", "c"],
        "max_tokens": 6,
        "seed": 3,
        "logprobs": 1,
        "n": 2,
        "echo": echo,
    }
    whole: Any = client.completions.create(**fields)
    offsets: dict[int, list[int]] = {choice.index: [] for choice in whole.choices}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    for choice in whole.choices:
        assert offsets[choice.index] == choice.logprobs.text_offset
        assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])


def test_the_prompt_of_a_chat_is_scored(client: openai.OpenAI, llm: LLM) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, temperature=0, extra_body={"prompt_logprobs": 1}
    )
    ours = llm.chat(MESSAGES, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1))[0]
    assert ours.prompt_logprobs is not None
    first, *others = answer.prompt_logprobs
    assert first is None
    assert [each["token_id"] for each in others] == ours.prompt_token_ids[1:]
    assert [each["logprob"] for each in others] == pytest.approx(
        [each.logprob for each in ours.prompt_logprobs if each is not None], abs=1e-4
    )
    assert answer.choices[0].message.content == ours.text
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs: leave stream out"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, extra_body={"prompt_logprobs": 1})


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_where_they_are_wanted(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    """Put them where vLLM does: a chat has one prompt, each choice of a completion its own."""
    wanted: Any = {"model": "tiny", "max_tokens": 2, "temperature": 0, "stream": stream}
    plain: Any = client.chat.completions.create(messages=MESSAGES, **wanted)
    first, *_ = plain if stream else [plain]
    assert not hasattr(first.choices[0], "token_ids")
    wanted["extra_body"] = {"return_token_ids": True}
    output = llm.chat(MESSAGES, SamplingParams(max_tokens=2, temperature=0))[0]
    ours = output.prompt_token_ids
    chat: Any = client.chat.completions.create(messages=MESSAGES, **wanted)
    chunks = list(chat) if stream else [chat]
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [ours]
    answers = [getattr(chunk.choices[0], "token_ids", None) or [] for chunk in chunks if chunk.choices]
    assert [token_id for each in answers for token_id in each] == output.outputs[0].token_ids
    found: Any = client.completions.create(prompt=["a b", "c"], **wanted)
    ids = {
        choice.index: choice.prompt_token_ids
        for chunk in (found if stream else [found])
        for choice in chunk.choices
        if hasattr(choice, "prompt_token_ids")
    }
    assert ids == {0: llm.token_ids("a b"), 1: llm.token_ids("c")}


@pytest.mark.anyio
async def test_many_at_once_asynchronously(server: Server, llm: LLM) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model="tiny", prompt=f"{i} and", max_tokens=8, temperature=0)
                for i in range(40)
            )
        )
    ours = llm.generate([f"{i} and" for i in range(40)], SamplingParams(max_tokens=8, temperature=0))
    assert [answer.choices[0].text for answer in answers] == [each.text for each in ours]


def test_prompts_are_scored_as_lm_eval_asks(client: openai.OpenAI, llm: LLM) -> None:
    """lm-evaluation-harness, local-completions: ids in, one token more, log-probabilities of all."""
    prompts = [llm.token_ids("one two three four"), llm.token_ids("five")]
    answer: Any = client.completions.create(
        model="tiny", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    scores = llm.score(prompts)
    for choice, ids, score in zip(answer.choices, prompts, scores, strict=True):
        values = choice.logprobs.token_logprobs
        assert len(values) == len(ids) + 1
        assert values[0] is None
        assert values[1:-1] == pytest.approx(score.logprobs, abs=1e-4)
        assert choice.logprobs.tokens[:-1] == [llm.tokenizer.token_text(token_id) for token_id in ids]
        for value, top in zip(values[1:], choice.logprobs.top_logprobs[1:], strict=True):
            assert max(top.values()) >= value - 1e-5


def test_a_prompt_alone_is_scored(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(
        model="tiny", prompt="one two", max_tokens=0, echo=True, extra_body={"prompt_logprobs": 2}
    )
    assert answer.choices[0].text == "one two"
    entries = answer.choices[0].prompt_logprobs
    assert entries[0] is None
    assert all(each["rank"] >= 1 and len(each["top"]) == 2 for each in entries[1:])


def test_a_stream_with_its_prompt(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="one", max_tokens=3, echo=True, logprobs=0, stream=True)
    tokens: list[str] = []
    text = ""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
    assert text.startswith("one")
    assert len(tokens) >= 4
