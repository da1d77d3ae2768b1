"""The server with OpenAI's own client, and its answers beside those of the engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import Server

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
