"""Test that a model's reasoning is separated from its answer, in any pieces and over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from openai.types.shared import ReasoningEffort

from lib.models import write_sentencepiece_model
from lib.server import Server, served
from lib.tokens import CHATML, THINKING
from minillm.server.bodies import Effort
from minillm.server.parsers.parts import CallPart, Part, PlainReader, TextPart, ThoughtPart
from minillm.server.parsers.thoughts import EFFORTS, ThoughtReader, with_effort
from minillm.server.parsers.tool_calls import CallReader
from minillm.text.reasoning_budget import NO_LIMIT

CALL = '<tool_call>{"name": "f"}</tool_call>'
# the prompt has opened the thoughts; text; thought; said
CASES: list[tuple[bool, str, str, str]] = [
    (False, "Hello <think>no</think>", "", "Hello <think>no</think>"),
    (False, "  Hello\n", "", "  Hello\n"),
    (False, "<think>\nWell,\n\n so  </think>\n\nYes. ", "Well,\n\n so", "Yes. "),
    (False, "\n<think></think>Yes", "", "Yes"),
    (False, "<think>Well", "Well", ""),
    (False, "<thin", "", "<thin"),
    (True, "Well </th </think> Yes </think>", "Well </th", "Yes </think>"),
    (True, "</think>\n\nYes", "", "Yes"),
    (True, "Well", "Well", ""),
    (True, "", "", ""),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_thoughts_are_taken_apart_wherever_the_text_is_cut(case: tuple[bool, str, str, str]) -> None:
    opened, text, thought, said = case
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        reader = ThoughtReader(PlainReader(), opened=opened)
        parts: list[Part] = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert "".join(part.text for part in parts if isinstance(part, ThoughtPart)) == thought, pieces
        assert "".join(part.text for part in parts if isinstance(part, TextPart)) == said, pieces


def test_white_space_at_the_beginning_belongs_to_a_continued_thought() -> None:
    for pieces in ([" and so\n</think>\nYes"], [" ", "and", " so", "\n", "</think>", "\n", "Yes"]):
        reader = ThoughtReader(PlainReader(), opened=True, has_reasoned=True)
        parts: list[Part] = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert "".join(part.text for part in parts if isinstance(part, ThoughtPart)) == " and so"
        assert "".join(part.text for part in parts if isinstance(part, TextPart)) == "Yes"


def test_a_call_follows_thoughts_and_none_is_among_them() -> None:
    reader = ThoughtReader(CallReader({"f": {}}, 1), opened=False)
    parts = reader.push(f"<think>{CALL}</think>\n{CALL}") + reader.finish()
    assert parts[0] == ThoughtPart(CALL)
    assert [type(part) for part in parts].count(CallPart) == 1


MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def thinking(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": THINKING}))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    sizes = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 2048}))  # room for tools
    with served(directory, "--num-blocks", "256") as running:
        yield running


def post(server: Server, **body: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 1, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()


def test_an_answer_begins_with_thoughts_where_the_template_opened_them(thinking: Server) -> None:
    message = post(thinking)["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 1, "stream": True}
    thought = said = ""
    for line in httpx.post(f"{thinking.url}/v1/chat/completions", json=body, timeout=120).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                thought += choice["delta"].get("reasoning_content", "")
                said += choice["delta"].get("content", "")
    assert (thought, said) == (message["reasoning_content"], "")


@pytest.mark.parametrize("how", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_thinking_is_switched_off(thinking: Server, how: dict[str, Any]) -> None:
    off, on = post(thinking, **how), post(thinking, chat_template_kwargs={"enable_thinking": True})
    assert off["choices"][0]["message"]["content"]
    assert "reasoning_content" not in off["choices"][0]["message"]
    assert "reasoning_content" in on["choices"][0]["message"]
    assert off["usage"]["prompt_tokens"] > on["usage"]["prompt_tokens"]


@pytest.mark.parametrize("limit", [0, 5])
def test_thoughts_end_at_their_limit(thinking: Server, limit: int) -> None:
    told: Any = {"max_reasoning_tokens": limit, "max_tokens": 80, "ignore_eos": True}
    answer = post(thinking, **told)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": limit}
    message = answer["choices"][0]["message"]
    assert message["content"]
    assert message.get("reasoning_content", "").endswith("Enough thinking; I will answer now." if limit else "")
    body = {"messages": MESSAGES, "seed": 1, "stream": True, "stream_options": {"include_usage": True}, **told}
    text = httpx.post(f"{thinking.url}/v1/chat/completions", json=body, timeout=120).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    used = chunks[-1]["usage"]
    del used["prompt_tokens_details"], answer["usage"]["prompt_tokens_details"]  # the second prompt is cached
    assert used == answer["usage"]


def test_a_fork_and_a_continued_message_go_on_with_the_thoughts(thinking: Server) -> None:
    first = post(thinking, temperature=0, max_tokens=12)
    more: list[Any] = [{"messages": None, "fork_of": {"id": first["id"], "num_tokens": 10}}]
    begun = {"role": "assistant", "content": "<think>\nFirst, I look at what the question is, and then"}
    more.append({"messages": [*MESSAGES, begun], "continue_final_message": True})
    for each in more:
        answer = post(thinking, ignore_eos=True, **each)
        message, usage = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]
        assert message["reasoning_content"]
        assert (message["content"], usage) == ("", {"reasoning_tokens": 12})
        answer = post(thinking, **each, max_reasoning_tokens=3, max_tokens=80, ignore_eos=True)
        message, usage = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]
        assert message["reasoning_content"].endswith("Enough thinking; I will answer now.")
        assert "</think>" not in message["content"]
        assert (bool(message["content"]), usage) == (True, {"reasoning_tokens": 3})
        said = post(thinking, **each, guided_choice=["yes", "no"])["choices"][0]["message"]
        assert said["content"] in ("yes", "no")
        assert "reasoning_content" not in said


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_continued_thought_keeps_its_white_space(thinking: Server, is_streamed: bool) -> None:
    def thought(**body: Any) -> str:
        sent = {"seed": 1, "max_tokens": 20, "logit_bias": {space: 100.0}, "stream": is_streamed, **body}
        text = httpx.post(f"{thinking.url}/v1/chat/completions", json=sent, timeout=120).text
        if not is_streamed:
            return str(json.loads(text)["choices"][0]["message"]["reasoning_content"])
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
        return "".join(c["delta"].get("reasoning_content", "") for chunk in chunks for c in chunk["choices"])

    [space] = httpx.post(f"{thinking.url}/tokenize", json={"prompt": " ", "add_special_tokens": False}).json()["tokens"]
    begun = {"role": "assistant", "content": "<think>\nFirst, I look"}
    assert thought(messages=[*MESSAGES, begun], continue_final_message=True) == " " * 20
    first = post(thinking, logit_bias={space + 1: 100.0}, max_tokens=2)
    assert thought(fork_of=first["id"]) == " " * 20
    opened = {"role": "assistant", "content": "<think>\n"}
    fresh = post(thinking, messages=[*MESSAGES, opened], continue_final_message=True, logit_bias={space: 100.0})
    assert "reasoning_content" not in fresh["choices"][0]["message"]


def test_thoughts_without_a_limit_are_counted(thinking: Server) -> None:
    assert post(thinking, ignore_eos=True)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


def test_a_grammar_is_for_the_answer_after_limited_thoughts(thinking: Server) -> None:
    told: Any = {"guided_choice": ["yes", "no"], "max_tokens": 80}
    limited = post(thinking, max_reasoning_tokens=4, **told)
    assert limited["choices"][0]["message"]["content"] in ("yes", "no")
    assert limited["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    told = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 220}
    [called] = post(thinking, max_reasoning_tokens=4, **told)["choices"]
    assert called["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in called["message"]["tool_calls"]] == ["f"]
    assert called["message"]["reasoning_content"]


@pytest.mark.parametrize(("effort", "limit"), [("none", None), ("low", 512), ("high", NO_LIMIT), ("max", NO_LIMIT)])
def test_an_effort_is_a_limit_where_the_template_has_tags(effort: str, limit: int | None) -> None:
    params = with_effort({"n": 1}, effort, THINKING, has_switch=True)
    assert params == ({"n": 1} if limit is None else {"n": 1, "max_reasoning_tokens": limit})
    assert with_effort({}, effort, CHATML, has_switch=True) == {}
    assert with_effort({"max_reasoning_tokens": 3}, effort, THINKING, has_switch=False) == {"max_reasoning_tokens": 3}
    assert with_effort({}, "none", THINKING, has_switch=False) == {"max_reasoning_tokens": 0}


def test_every_effort_of_the_client_is_known() -> None:
    theirs, _ = get_args(ReasoningEffort)
    assert {*get_args(theirs)} <= {*get_args(Effort)} == {*EFFORTS}


def test_a_model_without_tags_has_no_limit_of_thoughts(tmp_path: Path) -> None:
    with served(write_sentencepiece_model(tmp_path), "--num-blocks", "64") as running:
        body = {"prompt": "Hi", "max_tokens": 3, "max_reasoning_tokens": 5}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 400
    assert "max_reasoning_tokens: this model has no <think>" in answer.json()["error"]["message"]


def test_an_answer_of_a_form_is_an_answer(thinking: Server) -> None:
    message = post(thinking, guided_choice=["yes", "no"])["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert "reasoning_content" not in message


def test_thoughts_that_the_model_opens_itself(server: Server) -> None:
    message = post(server, guided_choice=["<think>Hm.</think>\n\nYes"], max_tokens=60)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinks": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
    ],
)
def test_a_switch_that_is_not_there_is_refused(server: Server, body: dict[str, Any], field: str) -> None:
    error = post(server, **body)["error"]
    assert error["param"] == field
    assert field in error["message"]


def test_two_switches_must_agree(thinking: Server) -> None:
    error = post(thinking, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})["error"]
    assert error["param"] == "reasoning_effort"
