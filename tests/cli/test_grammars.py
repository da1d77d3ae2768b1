"""``minillm generate`` with a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm.cli.main import main

Run = Callable[..., tuple[int, str, str]]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def run(tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run ``minillm generate`` in this process. Returns its exit code, output and errors."""
    monkeypatch.setenv("MINILLM_CONFIG", str(tmp_path))
    monkeypatch.delenv("MINILLM_MODEL", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        fixed = ("--model", str(tiny_model), "--device", "cpu", "--num-blocks", "64", "--max-tokens", "120")
        code = main(["generate", *arguments, *fixed])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def test_an_answer_follows_the_schema_in_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    code, said, _ = run("hello", "--json-schema", str(path), "--seed", "1")
    assert code == 0
    assert set(json.loads(said)) == {"ok"}
    code, said, _ = run("hello", "--json-schema", str(path), "--beam-width", "2", "--json")
    assert code == 0
    for answer in json.loads(said)["outputs"]:
        assert answer["finish_reason"] == "length" or set(json.loads(answer["text"])) == {"ok"}


def test_expressions_choices_and_lark(run: Run, tmp_path: Path) -> None:
    assert re.fullmatch("[a-d]{3,6}\n", run("hello", "--regex", "[a-d]{3,6}")[1])
    assert run("hello", "--choice", "red", "--choice", "green")[1] in ("red\n", "green\n")
    path = tmp_path / "grammar.lark"
    path.write_text('start: "a" "b"{2}\n')
    assert run("hello", "--lark", str(path))[1] == "abb\n"
    code, said, _ = run("hello", "--json-object", "--json")
    assert code == 0
    assert json.loads(said)["outputs"][0]["text"].startswith("{")


def test_a_line_of_a_file_has_its_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a", "grammar": {"choice": ["one"]}}, {"prompt": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, said, _ = run("-f", str(path), "--regex", "[xy]z", "--json")
    assert code == 0
    first, second = (json.loads(line)["outputs"][0]["text"] for line in said.splitlines())
    assert first == "one"
    assert re.fullmatch("[xy]z", second)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--regex", "("), "the regex is invalid: unclosed group"),
        (("--regex", "a", "--choice", "b"), "not allowed with"),
        (("--json-schema", "/nowhere/schema.json"), "--json-schema: cannot read /nowhere/schema.json"),
        (("--choice", ""), "a choice must not be empty"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("minillm.llm.LLM.__init__", None)
    code, _, said = run("hello", *arguments)
    assert code == 2
    assert says in said
    assert said.count("\n") == 1
