"""Tables of measurements: for people, row by row, and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from minillm.bench.registry import WORKLOADS
from minillm.bench.table import Column, plain, show


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    share: float | None = None

    COLUMNS: ClassVar = (
        Column("", lambda r: r.name, width=6),
        Column("ms", lambda r: 1e3 * r.seconds, ".1f"),
        Column("share", lambda r: r.share, ".0%"),
    )


@dataclass(frozen=True)
class Whole:
    total: float
    rows: list[Row]

    COLUMNS: ClassVar = (Column("total", lambda r: r.total, ".2f"), Column("nothing", lambda r: None, "d"))


def test_one_result_is_a_line_for_each_figure_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    show(Row("a", 0.5), "heading")
    assert capsys.readouterr().out.splitlines() == [
        "heading",
        "                                  a",
        "  ms                              500.0",
    ]


def test_several_results_stand_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show([Row("a", 0.0015, 0.5), Row("longer", 12.0)])
    assert capsys.readouterr().out.splitlines() == [
        "                 ms      share",
        "  a             1.5        50%",
        "  longer    12000.0",
    ]


def test_rows_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def rows() -> Iterator[Row]:
        for name in "abc":
            seen.append(capsys.readouterr().out)
            yield Row(name, 0.0)

    show(rows())
    assert seen[0] == ""
    assert seen[1].splitlines()[1].split() == ["a", "0.0"]
    assert seen[2].split() == ["b", "0.0"]


def test_parts_and_inner_lists_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Whole(1.0, [Row("x", 0.0)])
    show({"first": whole, "second": iter([Row("y", 0.0)])})
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == ["first", "total", "ms", "x", "second", "ms", "y"]
    assert plain({"first": whole, "second": iter([Row("y", 2.0, 0.5)])}) == {
        "first": {"total": 1.0, "rows": [{"name": "x", "seconds": 0.0, "share": None}]},
        "second": [{"name": "y", "seconds": 2.0, "share": 0.5}],
    }


# What scripts read: these names stay.
FIELDS = {
    "latency.LatencyResult": "name batch_size time_to_first_token time_per_output_token decode_rate overall_rate "
    "floor_rate fraction_of_floor idle_share peak_kv_tokens",
    "start.StartResult": "process imports load first_token rest total",
    "workloads.WorkloadResult": "workload name num_requests output_tokens seconds rate time_to_first_token "
    "time_per_output_token floor_seconds fraction_of_floor idle_share peak_kv_tokens peak_kv_share longest_wait",
    "serve.ServeResult": "rate num_requests seconds output_rate time_to_first_token time_per_output_token "
    "normalised_latency",
    "share.ShareResult": "num_replicas num_requests output_tokens seconds rate",
    "profile.Profile": "batch_size context step_microseconds kernels",
    "profile.KernelShare": "kernel launches launches_per_layer microseconds bytes fraction",
    "matvec.MatvecResult": "op features columns floor cublas ours tile recorded",
    "chunk_attention.ChunkAttentionResult": "prompt completion copied shared ours",
    "kernels.Limits": "copy_bandwidth matmul_rate",
    "kernels.KernelResult": "op shape microseconds bytes flops bound fraction error",
    "memory.MemoryResult": "table lengths setting value",
    "swap.SwapResult": "block_size num_tokens swap_out swap_in recompute",
    "host.HostResult": "what microseconds",
    "ui.UiFigures": "first_paint key_median key_p95 drawing_share tokens_per_second_watched tokens_per_second_held "
    "slowdowns slowdown",
}


def some(annotation: str) -> Any:
    """A value of a field's type."""
    kinds = {"int": 3, "float": 0.25, "str": "text", "list[float]": [0.5, 0.25], "list[KernelShare]": []}
    return kinds.get(annotation.split(" | ")[0], (1, 2, 3))


@pytest.mark.parametrize("result", FIELDS)
def test_every_result_has_its_fields_and_can_be_shown(result: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, name = result.split(".")
    cls = getattr(__import__(f"minillm.bench.{module}", fromlist=[name]), name)
    assert [field.name for field in fields(cls)] == FIELDS[result].split()
    made = cls(**{field.name: some(str(field.type)) for field in fields(cls)})
    show([made])
    header, line = capsys.readouterr().out.splitlines()
    show(made)
    upright = capsys.readouterr().out.splitlines()
    assert len(upright) == len(cls.COLUMNS)
    assert all(column.title in header for column in cls.COLUMNS)
    assert all(column.text(made) in line for column in cls.COLUMNS)
    json.dumps(plain([made]))


def test_every_workload_is_where_the_registry_says() -> None:
    for name, file, _ in WORKLOADS:
        module = __import__(f"minillm.bench.{file}", fromlist=["WORKLOADS"])
        assert name in module.WORKLOADS
        module.WORKLOADS[name].options()


def test_help_imports_nothing_heavy() -> None:
    """Neither for the list of workloads nor for one of them, but for the app's, whose options are read with the app."""
    names = [name for name, *_ in WORKLOADS if name != "ui"]
    code = f"""
import contextlib, io, sys
from minillm.cli.main import main
for words in ([], ["bench"], *(["bench", name] for name in {names})):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    print([*words, *(name for name in ("torch", "numpy", "textual", "tqdm") if name in sys.modules)])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = [[], ["bench"], *(["bench", name] for name in names)]
    assert result.stdout.splitlines() == [str(words) for words in expected], result.stderr
