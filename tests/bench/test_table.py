"""Tables of measurements: for people, row by row, and as JSON."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

import pytest

from minillm.bench.table import WORKLOADS, computed, figures, plain, show, shown, workload


@dataclass(frozen=True)
class Row:
    name: str = shown("", width=6)
    seconds: float = shown("ms", ".1f", 1e3)
    share: float | None = shown("share", ".0%", default=None)
    unseen: int = 0

    @computed("twice", ".1f")
    def twice(self) -> float:
        return 2 * self.seconds


@dataclass(frozen=True)
class Whole:
    rows: list[Row]
    totals: tuple[float, ...] = shown("totals", ".2f")
    nothing: int | None = shown("nothing", "d", default=None)


def test_one_result_is_a_line_for_each_figure_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    show(Row("a", 0.5), "heading")
    assert capsys.readouterr().out.splitlines() == [
        "heading",
        "                                  a",
        "  ms                              500.0",
        "  twice                           1.0",
    ]


def test_several_results_stand_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row("a", 0.0015, 0.5), Row("longer", 12.0)])
    assert capsys.readouterr().out.splitlines() == [
        "                 ms      share      twice",
        "  a             1.5        50%        0.0",
        "  longer    12000.0                  24.0",
    ]


def test_rows_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def rows() -> Iterator[Row]:
        for name in "abc":
            seen.append(capsys.readouterr().out)
            yield Row(name, 0.0)

    show(rows())
    assert seen[0] == ""
    assert seen[1].splitlines()[1].split() == ["a", "0.0", "0.0"]
    assert seen[2].split() == ["b", "0.0", "0.0"]


def test_parts_and_inner_lists_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Whole([Row("x", 0.0)], (1.0, 2.5))
    show({"first": whole, "second": iter([Row("y", 0.0)])})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["first", "totals", "ms", "x", "second", "ms", "y"]
    assert lines[1].split(maxsplit=1)[1] == "1.00 / 2.50"
    assert plain({"first": whole, "second": iter([Row("y", 2.0, 0.5)])}) == {
        "first": {
            "rows": [{"name": "x", "seconds": 0.0, "share": None, "unseen": 0}],
            "totals": (1.0, 2.5),
            "nothing": None,
        },
        "second": [{"name": "y", "seconds": 2.0, "share": 0.5, "unseen": 0}],
    }


# Scripts read these names: they stay.
FIELDS = {
    "latency.LatencyResult": "name batch_size time_to_first_token time_per_output_token decode_rate overall_rate "
    "floor_rate fraction_of_floor idle_share peak_kv_tokens",
    "start.StartResult": "process imports load first_token rest total",
    "workloads.WorkloadResult": "workload name num_requests output_tokens seconds rate time_to_first_token "
    "time_per_output_token floor_seconds fraction_of_floor idle_share peak_kv_tokens peak_kv_share longest_wait",
    "serve.ServeResult": "rate num_requests seconds output_rate time_to_first_token time_per_output_token "
    "normalised_latency num_failed request_rate longest_gap goodput good_share by_turn",
    "profile.Profile": "batch_size context step_microseconds kernels",
    "profile.KernelShare": "kernel launches launches_per_layer microseconds bytes fraction",
    "kernels.LoadLimits": "copy_bandwidth matmul_rate",
    "kernels.KernelResult": "op shape microseconds bytes flops bound fraction error",
    "memory.MemoryResult": "table lengths setting value",
    "memory.SwapResult": "block_size num_tokens swap_out swap_in recompute",
    "host.HostResult": "what microseconds",
    "http.HttpResult": "num_streams num_requests own_rate http_rate lost own_first http_first http_costs",
    "ui.UiFigures": "first_paint key_median key_p95 open_seconds open_mb drawing_share tokens_per_second_watched "
    "tokens_per_second_held slowdowns slowdown",
}


def some(hint: Any) -> Any:
    """A value of a field's type; the type may be a string."""
    written = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    kinds = {"int": 3, "float": 0.25, "str": "text", "list[KernelShare]": []}
    kinds |= {"tuple[float, ...]": (0.5, 0.25)}
    return kinds.get(written.split(" | ")[0], (0.1, 0.2, 0.3))


@pytest.mark.parametrize("result", FIELDS)
def test_every_result_has_its_fields_and_can_be_shown(result: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, name = result.split(".")
    cls = getattr(importlib.import_module(f"minillm.bench.{module}"), name)
    assert [field.name for field in fields(cls)] == FIELDS[result].split()
    made = cls(**{field.name: some(field.type) for field in fields(cls)})
    show([made])
    header, line = capsys.readouterr().out.splitlines()
    show(made)
    upright = capsys.readouterr().out.splitlines()
    assert len(upright) == len(list(figures(made))) > 1
    assert all(column.title in header and text in line for column, text in figures(made))
    json.dumps(plain([made]))


def test_every_workload_is_where_the_table_says() -> None:
    for name in WORKLOADS:
        measure, options = workload(name)
        assert callable(measure)
        options()


def test_help_imports_nothing_heavy() -> None:
    code = """
import contextlib, io, sys
from minillm.cli.main import main
for words in ([], ["bench"]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    print([name for name in ("torch", "numpy", "textual", "tqdm") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["[]", "[]"], result.stderr
