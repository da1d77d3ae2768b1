"""`minillm bench io` on a small model: the reported figures, not the speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minillm.bench import io
from minillm.bench.io import IoOptions, measure
from minillm.bench.table import Subject
from minillm.errors import UsageError
from minillm.llm import LLM


def test_each_case_is_a_row(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, seen = LLM(str(tiny_model), device="cpu", num_blocks=64), []
    generate = llm.generate

    def noting(prompts: Any, params: Any, **options: Any) -> Any:
        outputs = generate(prompts, params, **options)
        seen.append((len(outputs), len(outputs[0].prompt_token_ids), len(outputs[0].outputs[0].token_ids)))
        return outputs

    monkeypatch.setattr(llm, "generate", noting)
    first, second = measure(Subject(llm, "tiny", "io"), IoOptions(cases="6:20:2,3:2:70"))
    assert (first.input_len, first.output_len, first.num_requests) == (6, 20, 2)
    assert first.rate == pytest.approx(40 / first.seconds)
    assert second.num_requests == 70
    assert second.rate == pytest.approx(140 / second.seconds)
    assert seen == [(1, 6, 1)] * 4 + [(2, 6, 16), (2, 6, 20)] + [(1, 3, 1)] * 4 + [(64, 3, 2), (70, 3, 2)]


@pytest.mark.parametrize("cases", ["", "128", "1:2", "1:2:0", "1:2:3:4", "1:2:x"])
def test_other_cases_are_refused(cases: str) -> None:
    with pytest.raises(UsageError, match="IN:OUT:REQUESTS"):
        IoOptions(cases=cases)


def test_the_default_cases_are_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "_CASES", "6:2:1")
    [only] = measure(Subject(LLM(str(tiny_model), device="cpu", num_blocks=64), "tiny", "io"), IoOptions())
    assert (only.input_len, only.output_len, only.num_requests) == (6, 2, 1)
