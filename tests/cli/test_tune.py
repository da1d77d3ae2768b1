"""``minillm tune``: the table, the JSON, one line for each mistake; without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minillm.cli import tune
from minillm.cli.main import main
from minillm.cli.tune import TileResult
from minillm.config import EngineConfig

RESULTS = [
    TileResult((1, 2, 8), "4 bits super 32, 2048 x 2048, add", 1, 5.25, 2.1),
    TileResult((), "4 bits super 32, 2048 x 2048, add", 64, 21.0, 2.1),
]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EngineConfig]]:
    """What is to be measured; and a machine without a user's files."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"MINILLM_{name}", str(tmp_path / name))
    found: list[tuple[str, EngineConfig]] = []

    def measured(name: str, config: EngineConfig) -> Iterator[TileResult]:
        found.append((name, config))
        yield from RESULTS

    monkeypatch.setattr(tune, "_measured", measured)
    return found


def test_the_table(asked: list[tuple[str, EngineConfig]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shape", "llama-1b:q4_k_m", "--device", "cuda:1"]) == 0
    (name, config) = asked[0]
    assert (name, config.load_format, config.device) == ("llama-1b", "dummy:q4_k_m", "cuda:1")
    heading, titles, *rows = capsys.readouterr().out.splitlines()
    assert heading == "llama-1b"
    assert titles.split() == ["matrix", "tokens", "us", "floor", "us", "of", "it", "tile"]
    assert [row.split()[-3:] for row in rows] == [["1", "2", "8"], ["2.1", "10%", "unpacked"]]
    assert rows[0].split()[-4] == "40%"


def test_json(asked: list[tuple[str, EngineConfig]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "org/model", "--quantize", "int4", "--json"]) == 0
    assert (asked[0][0], asked[0][1].quantize, asked[0][1].load_format) == ("org/model", "int4", "auto")
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["tile"] == [1, 2, 8]
    assert rows[1] == {
        "product": "4 bits super 32, 2048 x 2048, add", "tokens": 64, "tile": [], "microseconds": 21.0, "floor": 2.1,
    }  # fmt: skip


def test_settings_of_the_file_count_but_a_model_is_one_process(
    asked: list[tuple[str, EngineConfig]], tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('model = "org/own"\n[engine]\ntensor_parallel_size = 4\nquantize = "int8"\n')
    assert main(["tune", "--config", str(file)]) == 0
    assert asked[0][0] == "org/own"
    assert (asked[0][1].tensor_parallel_size, asked[0][1].quantize) == (1, "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama-1b:q4_k_m", "--device", "cpu"], "minillm tune needs a CUDA GPU"),
        (["--shape", "llama-2b"], "unknown shape 'llama-2b'"),
        (["org/model", "--shape", "llama-1b"], "not both"),
        (["--device", "tpu"], "device must be auto, cpu, cuda"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
