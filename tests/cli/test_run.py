"""``minillm run``, the other names of ``minillm models``, and the hint that ``generate`` uses no chat template."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minillm.cli import run as run_command
from minillm.cli.main import main
from minillm.cli.run import model_and_question
from minillm.errors import UsageError

FIXED = ("--device", "cpu", "--num-blocks", "64", "--temperature", "0")
HINT = "minillm: completing the text as it is; this is a chat model, and --chat applies its chat template\n"
Minillm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def minillm(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Minillm]:
    """Run a command in this process, with a text as its standard input. Returns its exit code, output and errors."""
    monkeypatch.setenv("MINILLM_CONFIG", str(tmp_path))
    monkeypatch.delenv("MINILLM_MODEL", raising=False)
    own_input = os.dup(0)

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        (tmp_path / "stdin").write_text(stdin)
        number = os.open(tmp_path / "stdin", os.O_RDONLY)
        os.dup2(number, 0)
        os.close(number)
        code = main([*arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    yield call
    os.dup2(own_input, 0)
    os.close(own_input)


@pytest.fixture
def base_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model without a chat template."""
    path = tmp_path / "base"
    shutil.copytree(tiny_model, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


@pytest.mark.parametrize(
    ("model", "words", "found"),
    [
        (None, [""], (None, "")),
        (None, ["Why is the sky blue?"], (None, "Why is the sky blue?")),
        (None, ["smollm2-135m"], ("smollm2-135m", "")),
        (None, ["smollm2-135m", "Why?"], ("smollm2-135m", "Why?")),
        (None, ["smollm2-135m", "why", "so", "blue"], ("smollm2-135m", "why so blue")),
        (None, ["org/name", "hi"], ("org/name", "hi")),
        ("smollm2-135m", ["why", "so"], ("smollm2-135m", "why so")),
        (None, ["Why?"], (None, "Why?")),
        (None, ["Summarize:"], (None, "Summarize:")),  # as in `cat notes.txt | minillm run "Summarize:"`
        (None, ["Hello.", "Who", "are", "you?"], (None, "Hello. Who are you?")),
        (None, ["为什么"], (None, "为什么")),
    ],
)
def test_a_first_word_that_could_be_a_name_is_the_model(
    model: str | None, words: list[str], found: tuple[str | None, str]
) -> None:
    assert model_and_question(model, words) == found


def test_a_directory_with_a_blank_in_its_name_is_the_model(tmp_path: Path) -> None:
    path = tmp_path / "my model"
    path.mkdir()
    assert model_and_question(None, [str(path), "hi"]) == (str(path), "hi")


def test_a_first_word_that_is_not_a_model_is_an_error() -> None:
    words = r"unknown model 'what'; .* put the question in quotation marks; a question of one word needs --model"
    with pytest.raises(UsageError, match=words):
        model_and_question(None, ["what", "is", "this"])


def test_run_answers_with_the_chat_template(minillm: Minillm, tiny_model: Path) -> None:
    _, expected, _ = minillm("generate", "--chat", "say hi", "-m", str(tiny_model), *FIXED, "--max-tokens", "8")
    assert minillm("run", str(tiny_model), "--max-tokens", "8", *FIXED, "say", "hi") == (0, expected, "")
    piped = minillm("run", "--max-tokens", "8", *FIXED, "-m", str(tiny_model), stdin="say hi\n")
    assert piped == (0, expected, "")


def test_run_has_the_defaults_of_the_chat(minillm: Minillm, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('system = "You are brief."')
    options = ("--json", *FIXED, "--max-model-len", "400", "--ignore-eos")
    answer = json.loads(minillm("run", str(tiny_model), "say hi", *options)[1])
    like_it = ("-s", "You are brief.", "-m", str(tiny_model))
    same = json.loads(minillm("generate", "say hi", *like_it, *options, "--max-tokens", "1024")[1])
    assert len(answer["prompt_token_ids"]) + len(answer["outputs"][0]["token_ids"]) == 400
    assert (answer["prompt_token_ids"], answer["outputs"]) == (same["prompt_token_ids"], same["outputs"])


def test_run_without_a_question_opens_the_chat(minillm: Minillm, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[argparse.Namespace] = []

    def chat(arguments: argparse.Namespace) -> int:
        opened.append(arguments)
        return 0

    monkeypatch.setattr(run_command, "chat", chat)
    monkeypatch.setattr(run_command.os, "isatty", lambda number: True)
    assert minillm("run", "smollm2-135m", "-t", "0.3") == (0, "", "")
    [found] = opened
    assert (found.model, found.temperature, found.question, found.server) == ("smollm2-135m", 0.3, None, None)
    for option in ("--json", "--json-object"):
        assert "without a question" in minillm("run", option)[2]


@pytest.mark.parametrize("name", ["list", "ls"])
def test_models_has_the_names_that_other_programs_give_it(minillm: Minillm, name: str) -> None:
    code, out, _ = minillm(name, "--json")
    assert code == 0
    assert out == minillm("models", "--json")[1]


def test_generate_says_once_that_chat_applies_the_template(
    minillm: Minillm, tiny_model: Path, base_model: Path, tmp_path: Path
) -> None:
    def said(*words: str, model: Path = tiny_model) -> str:
        code, _, errors = minillm("generate", *words, "-m", str(model), *FIXED, "--max-tokens", "2")
        assert code == 0
        return errors

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"prompt": [5, 6]}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert said("hello") == HINT
    assert said("-f", str(prompts), "--lines") == HINT
    for words in (
        ("hello", "--chat"), ("hello", "-s", "x"), ("hello", "--json"), ("hello", "-q"), ("hello", "--parse-special"),
        ("-f", str(ids)),
    ):  # fmt: skip
        assert said(*words) == "", words
    assert said("hello", model=base_model) == ""


def test_scores_of_a_prompt_need_no_template(minillm: Minillm, tiny_model: Path) -> None:
    options = ("--max-tokens", "0", "--prompt-logprobs", "0")
    code, _, errors = minillm("generate", "hello", "-m", str(tiny_model), *FIXED, *options)
    assert (code, errors) == (0, "")
