"""Thoughts of a model: apart from its answer, in texts of any cut and over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lib.server import Server, served
from lib.tokens import THINKING
from minillm.server.parts import CallPart, Part, PlainReader, TextPart, ThoughtPart
from minillm.server.thoughts import ThoughtReader
from minillm.server.tool_calls import CallReader

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
