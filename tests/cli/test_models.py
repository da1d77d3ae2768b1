"""Test the commands for models, and shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm import system
from minillm.cli.main import main
from minillm.progress import rate, size
from minillm.weights.files import FileRecord, downloading, models_dir, place, sha256_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"MINILLM_{name}", str(tmp_path / name))
    monkeypatch.delenv("MINILLM_MODEL", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def download(name: str, model: Path) -> None:
    """Make ``name`` a downloaded model with the files of ``model``."""
    with downloading(name, print) as partial:
        records = []
        for path in model.iterdir():
            (partial / path.name).write_bytes(path.read_bytes())
            records.append(FileRecord(path.name, path.stat().st_size, sha256_of(path)))
        place(name, partial, "the hub (org/tiny)", records, {})


def test_names_of_directories_are_shown_and_not_obeyed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b]0;OWNED\x07\x1b[31mRED\u202e\x9b"
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"MINILLM_{name}", str(tmp_path / f"{evil}{name}"))
    for name in (evil, "\udc9b31mx"):
        folder = models_dir() / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        record = {"source": evil, "files": [{"name": "config.json", "size": 2, "sha256": "x"}]}
        (folder / "minillm.json").write_text(json.dumps(record))
    for arguments in (("models",), ("info",), ("show", evil), ("pull", evil), ("rm", evil), ("rm", "\udc9b31mx")):
        _, out, error = run(*arguments)
        assert out + error
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*out, *error}, arguments
    assert "OWNED" not in run("models")[1], "it was deleted"


def test_models_and_show_agree(run: Run) -> None:
    listed = {row["name"]: row for row in map(json.loads, run("models", "--json")[1].splitlines())}
    shown = json.loads(run("show", "smollm2-135m", "--json")[1])
    assert (shown["size"], shown["license"]) == (listed["smollm2-135m"]["size"], listed["smollm2-135m"]["license"])
    heading = run("models")[1].splitlines()[0]
    assert "license" in heading


def test_a_downloaded_model_is_shown_listed_verified_and_removed(run: Run, tiny_model: Path) -> None:
    download("org/tiny", tiny_model)
    shown = json.loads(run("show", "org/tiny", "--json")[1])
    assert shown["source"] == "the hub (org/tiny)"
    assert shown["path"] == str(models_dir() / "org--tiny")
    assert shown["size"] > 100_000
    assert shown["stored_as"].startswith("F32")
    assert shown["chat_template"] is True
    assert shown["context"] == 512
    assert "org/tiny" in run("models")[1]
    assert "org/tiny" in run("info")[1]
    code, out, _ = run("pull", "org/tiny", "--verify")
    assert code == 0
    assert "is here already, every file has its sha256" in out
    (models_dir() / "org--tiny" / "config.json").write_bytes(b" " * (tiny_model / "config.json").stat().st_size)
    assert "`minillm rm org/tiny`" in run("pull", "org/tiny", "--verify")[2]
    code, out, _ = run("rm", "org/tiny")
    assert code == 0
    assert "are free again" in out
    assert list(models_dir().glob("*/")) == []
    assert run("rm", "org/tiny")[0] == 2


def test_files_of_a_directory_without_a_model_are_not_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(path: Path) -> int:
        raise AssertionError(f"all files below {path} are counted")

    monkeypatch.setattr("minillm.cli.models.size_on_disk", counted)
    assert "/config.json is missing" in run("show", "/")[2]


def test_a_directory_and_a_model_that_is_not_here_are_shown(run: Run, tiny_model: Path) -> None:
    code, out, _ = run("show", str(tiny_model))
    assert code == 0
    for words in (
        f"path                  {tiny_model}",
        "context               512",
        "stored as             F32 (100%)",
    ):
        assert words in out
    out = run("show", "llama-3.2-1b")[1]
    assert "not downloaded" in out
    assert "gated                 yes" in out
    assert "the hub (meta-llama/Llama-3.2-1B-Instruct)" in out
    assert "the hub (org/name)" in run("show", "org/name")[1]
    code, out, _ = run("pull", str(tiny_model), "--verify")
    assert out == f"{tiny_model} is here already: {tiny_model} (from {tiny_model})\n"


def test_show_reads_no_weights(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_model, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text("{")
    code, out, said = run("show", str(tmp_path / "damaged"))
    assert (code, out, said.count("\n")) == (1, "", 1)


def test_models_says_what_fits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "memory", lambda: (8 << 30, 16 << 30))
    monkeypatch.setattr("minillm.cli.models._gpu_memory", lambda: 0)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    names = ("smollm2-135m", "llama-3.1-8b", "llama-3.1-8b:q8_0", "llama-3.1-8b:q4_k_m", "llama-3.2-3b")

    def fits() -> list[str]:
        rows = {row["name"]: row["fits"] for row in map(json.loads, run("models", "--json")[1].splitlines())}
        return [rows[name] for name in names]

    assert fits() == ["CPU", "no", "no", "CPU", "CPU in few bits"]
    [line] = [line for line in run("models")[1].splitlines() if "4.6 GiB" in line and "Llama" in line]
    assert "  CPU, taken  " in line
    assert "CPU*: fits only quantized, with --weights" in run("models")[1]
    monkeypatch.setattr(system, "memory", lambda: (11 << 30, 16 << 30))
    assert fits() == ["CPU", "CPU in few bits", "CPU", "CPU", "CPU"]
    monkeypatch.setattr("minillm.cli.models._gpu_memory", lambda: 24 << 30)
    assert fits() == ["GPU"] * 5
    assert "a GPU with 24.0 GiB" in run("models")[1]
    assert "CPU*" not in run("models")[1]


@pytest.mark.parametrize("gib", [1, 2, 4, 6, 8, 12, 16, 20, 40, 80])
def test_fit_models_and_the_chat_say_the_same(run: Run, monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """The verdict, the quantization that a chat takes, and its tokens per second."""
    from minillm.config import EngineConfig
    from minillm.errors import DownloadError
    from minillm.fit.verdicts import budget_before_start, devices_of
    from minillm.loading import fits
    from minillm.ui.dialogs import fit_of

    memory, speed = (gib << 30, 96 << 30), 20e9
    monkeypatch.setattr(system, "memory", lambda: memory)
    monkeypatch.setattr("minillm.cli.models._gpu_memory", lambda: 0)
    monkeypatch.setattr("minillm.cli.models.kept_rate", lambda device: speed)
    listed = {row["name"]: row for row in map(json.loads, run("models", "--json")[1].splitlines())}
    rows = json.loads(run("fit", "--device", "cpu", "--bandwidth", "20GB/s", "--json")[1])["models"]
    fitted = {row["name"]: row for row in reversed(rows)}  # the model as it is, before ways to hold it
    config = EngineConfig(device="cpu")
    for name, row in fitted.items():
        assert (listed[name]["fits"] == "CPU") == row["fits"], name
        if row["fits"]:
            assert listed[name]["tokens_per_second"] == row["tokens_per_second"]
            assert listed[name]["taken"] == row["best"], name
    for name, entry in fits.load_manifest().models.items():
        shown = fit_of(entry, devices_of(config, memory, 0, speed)).split()
        of_name = [each for each in listed.values() if each["name"].partition(":")[0] == name]
        taken = next((each for each in of_name if each["taken"]), None)
        assert (shown[0] == "CPU") == (taken is not None)
        tried: list[str] = []

        def resolve(name: str, tried: list[str] = tried, **options: Any) -> None:
            tried.append(name)
            raise DownloadError("no network")

        monkeypatch.setattr(fits, "resolve", resolve)
        if taken is not None:
            form = [taken["name"].partition(":")[2] or "full"] if entry.forms else []
            assert shown == ["CPU", *form, rate(taken["tokens_per_second"]), "tok/s"]
        if taken is not None and entry.forms:
            with pytest.raises(DownloadError):
                fits.choose_form(name, lambda: budget_before_start(config, *memory, False), bandwidth=lambda: speed)
            assert tried[0] == taken["name"], "which a chat then loads"


def test_a_form_is_named_behind_a_colon(run: Run, tiny_model: Path) -> None:
    names = [json.loads(line)["name"] for line in run("models", "--json")[1].splitlines()]
    at = names.index("llama-3.1-8b")
    assert names[at : at + 4] == ["llama-3.1-8b", "llama-3.1-8b:q8_0", "llama-3.1-8b:q6_k", "llama-3.1-8b:q4_k_m"]
    shown = json.loads(run("show", "llama-3.1-8b:q4_k_m", "--json")[1])
    assert (shown["name"], shown["gated"], shown["size"]) == ("llama-3.1-8b:q4_k_m", False, 4_920_739_232)
    assert shown["source"].endswith("-GGUF, Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf)")
    assert "forms                 full (15.0 GiB), q8_0 (8.0 GiB), q6_k (6.1 GiB), q4" in run("show", "llama-3.1-8b")[1]
    assert json.loads(run("show", "llama-3.1-8b", "--json")[1])["forms"]["q6_k"] == 6_596_011_424
    assert "forms" not in shown
    assert run("show", "llama-3.1-8b:full")[1] == run("show", "llama-3.1-8b")[1]
    code, out, said = run("pull", "llama-3.1-8b:q4")
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert "did you mean llama-3.1-8b:q4_k_m? its forms are full, q8_0, q6_k, q4_k_m" in said
    download("llama-3.2-1b", tiny_model)
    download("llama-3.2-1b:q8_0", tiny_model)
    assert "  :q8_0" in run("models")[1]
    assert "llama-3.2-1b:q8_0 is here already" in run("pull", "llama-3.2-1b:q8_0")[1]
    assert "llama-3.2-1b is here already" in run("pull", "llama-3.2-1b:full")[1]
    assert run("rm", "llama-3.2-1b:q8_0")[0] == 0
    assert run("rm", "llama-3.2-1b:q8_0")[0] == 2
    assert run("rm", "llama-3.2-1b:full")[0] == 0


def test_info_knows_the_machine(run: Run) -> None:
    facts: dict[str, Any] = json.loads(run("info", "--json")[1])
    assert system.processor() in facts["devices"]["cpu"]
    assert "1 threads" not in facts["devices"]["cpu"]
    available, total = system.memory()
    assert 0 < available <= total
    assert facts["devices"]["memory"].endswith(f"of {size(total)} free")


def test_the_configured_model_is_the_default(run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_MODEL", str(tiny_model))
    assert run("pull")[1].startswith(f"{tiny_model} is here already")
    assert f"name                  {tiny_model}" in run("show")[1]


# --- completions ------------------------------------------------------------------------------------------------------


def completed(run: Run, *words: str) -> list[str]:
    code, out, _ = run("completions", "bash", "minillm", *words)
    assert code == 0
    return out.splitlines()


def test_words_are_completed_from_the_parser(run: Run, tiny_model: Path) -> None:
    assert {"chat", "generate", "show", "rm", "completions"} <= set(completed(run, ""))
    assert completed(run) == completed(run, "")
    assert completed(run, "ge") == ["generate"]
    assert completed(run, "l") == ["list", "ls"]
    assert completed(run, "run", "smollm2-13") == completed(run, "serve", "smollm2-13") == ["smollm2-135m"]
    assert completed(run, "--") == ["--version", "--help"]
    assert completed(run, "generate", "--tem") == ["--temperature"]
    assert "-t" in completed(run, "generate", "a prompt", "-")
    assert completed(run, "generate", "--dtype", "fl") == completed(run, "generate", "--dtype", "=", "fl")
    assert completed(run, "generate", "--dtype", "=") == ["auto", "float32", "bfloat16", "float16"]
    assert completed(run, "chat", "--theme", "d") == ["dark", "dracula"]
    assert completed(run, "bench", "lat") == ["latency"]
    assert "--batch-size" in completed(run, "bench", "latency", "--b")
    for anything in (
        ("generate", ""),
        ("generate", "--config", ""),
        ("generate", "--system", "--"),
        ("pull", "x", "-x"),
    ):
        assert completed(run, *anything) == []
    assert completed(run, "pull", "llama-3.2-1b:q4") == ["llama-3.2-1b:q4_k_m"]
    assert completed(run, "pull", "llama-3.2-1b", ":") == completed(run, "pull", "llama-3.2-1b", ":", "q")
    assert completed(run, "generate", "-m", "llama-3.2-1b", ":", "q4") == ["q4_k_m"], "as bash splits it"
    download("org/tiny", tiny_model)
    assert completed(run, "rm", "") == ["org/tiny"]
    forms = [f"smollm2-1.7b:{form}" for form in ("q8_0", "q6_k", "q4_k_m")]
    assert completed(run, "pull", "smollm2-1") == ["smollm2-135m", "smollm2-1.7b", *forms]
    assert "org/tiny" in completed(run, "generate", "-m", "")


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    program = tmp_path / "minillm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m minillm "$@"\n')
    program.chmod(0o755)
    script = """
eval "$(minillm completions bash)"
complete -p minillm
for line in "ge" "generate --beam-w" "generate -m smollm2-135" "generate --config "; do
    COMP_WORDS=(minillm ${line}); [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _minillm
    echo "${#COMPREPLY[@]}: ${COMPREPLY[*]}"
done
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MINILLM_CACHE": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o default -F _minillm minillm", "1: generate", "1: --beam-width", "1: smollm2-135m", "0: ",
    ]  # fmt: skip
