"""The README's Python runs, in its order, on the default model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.weights
def test_every_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(examples) >= 5
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
        assert capsys.readouterr().out.strip()
    llm = names["llm"]
    assert llm.cache_stats().used_blocks == 0  # type: ignore[attr-defined]


def test_the_examples_that_are_promised_are_short() -> None:
    search = re.search(r"^def tree_search.*?^    return texts\n", README, re.M | re.S)
    assert search is not None
    assert len(search[0].splitlines()) <= 20
