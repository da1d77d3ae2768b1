"""Test ``minillm fit``: table, JSON, and one line for each mistake, without network and mostly without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.checkpoints import LLAMA_1B, LLAMA_8B, forge_gguf, forge_hf, hf_tensors
from minillm import system
from minillm.checks import parse_bytes
from minillm.cli import fit
from minillm.cli.main import main
from minillm.loading.bandwidth import Bandwidth
from minillm.weights.files import FileRecord, downloading, place

GIB = 1 << 30
KEPT = {"int8": "in 8 bits", "int4": "kept"}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"MINILLM_{name}", str(tmp_path / name))

    def no_network(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network is asked")

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr("socket.create_connection", no_network)
    monkeypatch.setattr(fit, "_measured", lambda device: Bandwidth(20e9))
    monkeypatch.setattr(system, "memory", lambda: (7 * GIB, 8 * GIB))
    monkeypatch.setattr(fit, "_gpu_is_here", lambda: False)
    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", True)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["fit", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def rows(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    code, out, said = run("--json", *arguments)
    assert (code, said) == (0, "")
    models = json.loads(out)["models"]
    return {f"{row['name']} {row['quantize'] or KEPT.get(row['held'], '')}".strip(): row for row in models}


def test_every_form_of_the_manifest_is_a_row(run: Run) -> None:
    found = rows(run)
    assert {"smollm2-135m", "llama-3.1-8b", "llama-3.1-8b:q4_k_m", "mistral-7b-v0.3:q8_0"} <= set(found)
    assert sum(row["name"].startswith("llama-3.1-8b") for row in found.values()) == 4
    assert rows(run, "") == found, "an empty name, as with an unset variable, is none"
    best = {name for name, row in found.items() if row["best"]}
    assert {"smollm2-135m", "llama-3.1-8b:q4_k_m"} <= best
    assert "llama-3.2-1b" not in best, "below the speed at which a person reads"
    assert len(best) == len({name.partition(":")[0] for name in found}), "one of each model"
    row = found["llama-3.1-8b:q4_k_m"]
    assert row["file"] == row["weights"] == 4_920_739_232
    assert row["form"] == "q4_k_m"
    assert row["model_context"] == 131072
    assert 1000 < row["context"] < 10_000
    assert not row["downloaded"]
    assert 2.5 < row["tokens_per_second"] < 20e9 / 4.6e9
    assert found["llama-3.1-8b"] | {"fits": False, "context": 0, "tokens_per_second": None} == found["llama-3.1-8b"]


def test_the_table_marks_the_best_and_names_its_command(run: Run) -> None:
    code, out, _ = run("llama-3.1-8b")
    assert code == 0
    head, columns, full, q8, _, q4, advice = out.splitlines()
    assert head == "this machine's CPU, with 8.0 GiB of memory, 6.6 GiB free for a model; it reads 20.0 GB/s (measured)"
    assert columns.split() == ["model", "file", "weights", "context", "tokens/s", "fits"]
    assert full.split() == ["llama-3.1-8b", "15.0", "GiB", "15.9", "GiB", "-", "-", "no"]
    assert q8.split()[0] == ":q8_0"
    assert q4.split()[:5] == [":q4_k_m", "4.6", "GiB", "4.6", "GiB"]
    assert q4.endswith("yes, best")
    assert advice == "minillm chat --model llama-3.1-8b:q4_k_m"
    assert len({line.rindex("  ") for line in (columns, full, q8)}) == 1, "columns stand below each other"


def test_a_busy_machine_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_measured", lambda device: Bandwidth(20e9, is_busy=True))
    head = run("llama-3.1-8b")[1].splitlines()[0]
    assert head.endswith("; it reads 20.0 GB/s (best measured; the machine is busy now)")
    assert "busy" not in run("llama-3.1-8b", "--bandwidth", "20GB/s")[1]


def test_a_faster_way_is_named_where_the_best_is_slow(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a chat loads the model as published."""
    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    machine = ("llama-3.2-1b", "--device", "cpu", "--memory", "20GiB", "--bandwidth")
    faster, best = run(*machine, "27GB/s")[1].splitlines()[-2:]
    assert best == "minillm chat --model llama-3.2-1b:full"
    assert faster.startswith("with 1")
    assert faster.endswith(" tokens/s: minillm chat --model llama-3.2-1b --weights int8")
    assert "tokens/s: " not in run(*machine, "80GB/s")[1]


def test_a_context_in_8_bits_is_longer_and_stands_in_the_command(run: Run) -> None:
    """A row of 128 numbers takes 132 bytes, and not 256."""
    wide, narrow = (
        rows(run, "llama-3.1-8b", "--memory", "8GiB", "--kv-cache-dtype", form)["llama-3.1-8b:q4_k_m"]["context"]
        for form in ("auto", "int8")
    )
    assert narrow == pytest.approx(wide * 256 / 132, rel=0.01)
    out = run("llama-3.1-8b", "--memory", "8GiB", "--kv-cache-dtype", "int8")[1]
    assert out.endswith("minillm chat --model llama-3.1-8b:q4_k_m --kv-cache-dtype int8\n")


def test_a_draft_model_takes_its_room(run: Run) -> None:
    """A draft model takes memory for weights, graphs, and K and V."""
    alone = rows(run, "llama-3.1-8b", "--memory", "24GiB")
    beside = rows(run, "llama-3.1-8b", "--memory", "24GiB", "--speculate", "llama-3.2-1b")
    full = "llama-3.1-8b"
    assert alone[full]["weights"] == beside[full]["weights"]
    assert beside[full]["needed"] - alone[full]["needed"] > 2 * GIB, "and steps are shorter"
    assert beside[full]["context"] < alone[full]["context"] / 2
    copied = rows(run, "llama-3.1-8b", "--memory", "24GiB", "--speculate", "llama-3.1-8b:int4")
    assert copied[full]["context"] < beside[full]["context"]
    assert not rows(run, "llama-3.2-1b", "--memory", "24GiB", "--speculate", "llama-3.1-8b")["llama-3.2-1b"]["fits"]
    out = run("llama-3.2-1b", "--memory", "80GiB", "--speculate", "llama-3.2-1b")[1]
    assert "no, its draft model reads as much" in out
    assert out.endswith("none fits: the draft model must be smaller than the model\n")
    code, out, _ = run("llama-3.1-8b", "--memory", "24GiB", "--speculate", "llama-3.2-1b")
    assert code == 0
    assert out.splitlines()[0].endswith("; the draft model llama-3.2-1b takes 2.8 GiB and 32 KiB per token of context")
    assert out.endswith(" --speculate llama-3.2-1b\n")


def test_another_machine_is_asked_for_by_its_memory(run: Run) -> None:
    by_memory = {gib: rows(run, "llama-3.1-8b", "--memory", f"{gib}GiB") for gib in (6, 8, 12, 24)}
    best = {gib: [name for name, row in found.items() if row["best"]] for gib, found in by_memory.items()}
    assert best == {6: [], 8: ["llama-3.1-8b:q4_k_m"], 12: ["llama-3.1-8b:q8_0"], 24: ["llama-3.1-8b"]}
    assert all(row["tokens_per_second"] is None for row in by_memory[24].values())
    out = run("llama-3.1-8b", "--memory", "12GiB")[1]
    assert "tokens/s " not in out
    assert "--bandwidth adds tokens per second" in out
    assert out.startswith("a GPU with 12.0 GiB, 10.3 GiB of it for the model")  # 1.2 GiB stay free
    assert run("llama-3.1-8b", "--memory", "24GiB")[1].endswith("minillm chat --model llama-3.1-8b:full\n")
    said = run("llama-3.1-8b", "--memory", "6GiB")[1].splitlines()[-1]
    assert said.startswith("none fits: llama-3.1-8b:q4_k_m needs ")
    assert said.endswith(" more than available")
    slow, fast = (
        rows(run, "llama-3.1-8b", "--memory", "24GiB", "--bandwidth", each)["llama-3.1-8b"]["tokens_per_second"]
        for each in ("500GB/s", "1 TB/s")
    )
    assert 25 < slow < 500 / 15
    assert 1.9 < fast / slow < 2
    on_cpu = rows(run, "llama-3.1-8b", "--memory", "24GiB", "--device", "cpu")
    assert on_cpu["llama-3.1-8b"]["weights"] > by_memory[24]["llama-3.1-8b"]["weights"]
    assert on_cpu["llama-3.1-8b"]["tokens_per_second"] is not None


def test_a_context_can_be_demanded(run: Run) -> None:
    assert rows(run, "llama-3.2-1b")["llama-3.2-1b"]["fits"]
    found = rows(run, "llama-3.2-1b", "--context", "60000")
    assert not found["llama-3.2-1b"]["fits"]
    assert run("llama-3.2-1b", "--context", "600")[1].endswith(" --max-model-len 600\n")
    assert not rows(run, "smollm2-360m", "--context", "9000")["smollm2-360m"]["fits"], "beyond the model's own"
    assert "none fits with a context of 9,000 tokens" in run("smollm2-360m", "--context", "9000")[1]


def test_a_file_and_a_directory_are_rows_of_their_own(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = forge_gguf(tmp_path / "8b.gguf", LLAMA_8B)
    [row] = rows(run, str(gguf), "--memory", "12GiB").values()
    assert row["name"] == str(gguf)
    assert row["downloaded"]
    assert row["fits"]
    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", False)
    on_cpu, kept = rows(run, str(gguf), "--device", "cpu", "--memory", "64GiB").values()
    by_name = rows(run, "llama-3.1-8b", "--device", "cpu", "--memory", "64GiB")
    guessed = by_name["llama-3.1-8b:q4_k_m"]
    assert guessed["weights"] > 3 * row["weights"]
    assert on_cpu["weights"] > 3 * row["weights"], "a CPU computes with numbers"
    assert by_name["llama-3.1-8b:q4_k_m kept"]["weights"] == pytest.approx(kept["weights"], rel=0.1)
    assert 1.1 < kept["weights"] / row["weights"] < 1.4
    for memory in ("7GiB", "9GiB", "40GiB"):  # dequantized it would take more than half of it
        [row] = rows(run, str(gguf), "--device", "cpu", "--memory", memory).values()
        assert (row["held"], row["fits"], row["weights"]) == ("int4", True, kept["weights"])
    out = run(str(gguf), "--device", "cpu", "--memory", "9GiB")[1]
    assert out.endswith(f"yes, here\nminillm chat --model {gguf}\n")
    directory = forge_hf(tmp_path / "1b", LLAMA_1B, hf_tensors(LLAMA_1B))
    whole, in_8_bits = rows(run, str(directory), "--device", "cpu").values()
    assert 0.4 < in_8_bits["weights"] / whole["weights"] < 0.6
    assert in_8_bits["held"] == "int8"
    found = rows(run, str(directory), "--memory", "4GiB")
    assert [row["quantize"] for row in found.values()] == [None, "int8", "int4", "fp8"]
    assert [row["fits"] for row in found.values()] == [False, True, True, True]
    assert run(str(directory), "--memory", "4GiB")[1].endswith(f"--model {directory} --quantize int8\n")
    assert len(rows(run, str(gguf), "--memory", "12GiB")) == 1, "it has few bits already"


def test_what_is_downloaded_is_read_and_not_guessed(run: Run, tmp_path: Path) -> None:
    gguf = forge_gguf(tmp_path / "m.gguf", LLAMA_1B, "Q8_0")
    with downloading("llama-3.2-1b:q4_k_m", print) as partial:
        (partial / gguf.name).hardlink_to(gguf)
        place("llama-3.2-1b:q4_k_m", partial, "a test", [FileRecord(gguf.name, gguf.stat().st_size, "")], {})
    row = rows(run, "llama-3.2-1b")["llama-3.2-1b:q4_k_m"]
    assert row["downloaded"]
    assert row["file"] > 1.3e9
    assert list(rows(run, "llama-3.2-1b:q4_k_m")) == ["llama-3.2-1b:q4_k_m"]
    assert "yes, here" in run("llama-3.2-1b:q4_k_m")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--memory", "12"), "--memory must be a size like 12GiB, not '12'"),
        (("--memory", "a lot"), "--memory must be a size"),
        (("--memory", "0GiB"), "--memory must be a size"),
        (("--memory", "-3GiB"), "--memory"),
        (("--memory", "9" * 40 + "GiB"), "--memory must be a size"),
        (("--memory", "1" * 15 + "TiB"), "--memory must be a size"),
        (("--memory", "\x1b[2JGiB"), "--memory must be a size"),
        (("--bandwidth", "fast"), "--bandwidth must be a size like 12GiB/s, not 'fast'"),
        (("--context", "0"), "--context must be at least 1"),
        (("--context", "many"), "--context"),
        (("--device", "tpu"), "device must be auto, cpu, cuda"),
        (("lama-3.1-8b",), "did you mean llama-3.1-8b?"),
        (("llama-3.1-8b:q5",), "has no form 'q5'"),
        (("org/name",), "org/name is not downloaded, so its size is unknown; `minillm pull org/name`"),
        (("./nothing.gguf",), "there is no file or directory"),
    ],
)
def test_a_wrong_value_is_one_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, error = run(*arguments)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert said in error
    assert "\x1b" not in error


def test_a_file_that_lies_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    code, out, said = run(str(tmp_path / "x.gguf"))
    assert (code, out, said.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [("12GiB", 12 << 30), ("24GB", 24_000_000_000), ("8 g", 8 << 30), ("1.5tib", 3 << 39), ("512MiB", 512 << 20)],
)
def test_sizes_have_units(text: str, number: int) -> None:
    assert parse_bytes("--memory", text) == number
    assert parse_bytes("--bandwidth", f"{text}/s", "/s") == number


def test_another_machine_takes_no_torch(tmp_path: Path) -> None:
    code = """
import contextlib, io, sys
from minillm.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main(["fit", "--memory", "12GiB"]) == 0
assert "llama-3.1-8b" in out.getvalue()
print([name for name in ("torch", "numpy", "gguf", "huggingface_hub", "triton") if name in sys.modules])
"""
    environment = {"PATH": "/usr/bin", "MINILLM_CACHE": str(tmp_path), "MINILLM_CONFIG": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.slow
def test_the_bandwidth_of_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 5e8 < fit._measured("cpu").rate < 2e12
