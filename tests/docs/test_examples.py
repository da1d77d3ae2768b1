"""The files of examples/ run on the default model, and their output reads well."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

import minillm.llm
from minillm import LLM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.weights


@pytest.fixture
def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run an example on the suite's default model, and return what it prints."""
    monkeypatch.setattr(minillm.llm, "LLM", lambda name: llm)

    def call(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert llm.cache_stats().used_blocks == 0, f"{name} leaves blocks in use"
        return capsys.readouterr().out

    return call


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    of_server = (EXAMPLES.parent / "docs/server.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert (
            f'run("{path.stem}")' in here
            or f"\n$ MINILLM_URL=http://127.0.0.1:8000/v1 python examples/{path.name}" in of_server
        )


def test_best_of_n_prints_the_most_probable_answer_first(run: Callable[[str], str]) -> None:
    output = run("best_of_n")
    scores = [float(found) for found in re.findall(r"^ *(-\d+\.\d\d)  \S", output, re.MULTILINE)]
    assert len(scores) == 6
    assert scores == sorted(scores, reverse=True)
    best = output.partition("Best: ")[2]
    assert re.search(r"light|scatter", best), best
    assert best.rstrip().endswith("."), "it is cut in the middle of a sentence"


def test_self_consistency_gets_the_sums_right(run: Callable[[str], str]) -> None:
    output = run("self_consistency")
    assert re.search(r"^What is 2 \+ 3\? 5 ", output, re.MULTILINE), output
    assert re.search(r"^What is 1 \+ 3\? 4 ", output, re.MULTILINE), output


def test_tree_search_continues_the_prompt_in_three_ways(run: Callable[[str], str]) -> None:
    lines = run("tree_search").splitlines()
    texts = [line.split("  ", 1)[1] for line in lines if "The best way to learn a language is" in line]
    assert len(texts) == 3
    assert all(len(text.split()) >= 16 for text in texts), texts
    assert len(set(texts)) == 3


def test_beams_follow_the_schema(run: Callable[[str], str]) -> None:
    lines = run("beams_with_schema").splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("{'name': 'Anna', 'age': 31, 'city': 'Rome'}"), lines


def test_streams_end_well(run: Callable[[str], str]) -> None:
    output = run("streaming")
    assert output.startswith(" four, five, six, seven, eight"), output
    assert "The capital of France is Paris." in output
    assert "The opposite of hot is cold." in output
    assert re.search(r"^Water boils at 100", output, re.MULTILINE), output


def test_scores_choose_the_right_answers(run: Callable[[str], str]) -> None:
    output = run("scoring")
    assert output.startswith("The capital of France is Paris "), output
    assert "The opposite of hot is cold " in output
    assert "fish can swim " in output
    low, high = map(float, re.findall(r"perplexity +([\d.]+)", output))
    assert low < 20 < 100 < high
