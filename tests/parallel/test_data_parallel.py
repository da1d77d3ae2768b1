"""Replicas share a file of prompts: nothing twice, nothing lost, in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from lib.torchrun import torchrun
from minillm.cli.main import main
from minillm.errors import MinillmError, UsageError
from minillm.parallel.shared_work import PartFiles, Replicas


def test_each_thing_is_handed_out_once_and_the_last_ones_singly() -> None:
    store, taken = HashStore(), []
    lock = threading.Lock()

    def work(index: int) -> None:
        replicas = Replicas(store, index, 4)
        while got := replicas.take(1000, 64):
            with lock:
                taken.append(got)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(i for got in taken for i in got) == list(range(1000))
    assert max(len(got) for got in taken) <= 64
    assert all(len(got) == 1 for got in taken if got.start >= 995)


def test_nothing_beyond_the_last_is_handed_out() -> None:
    """A replica looks at the rest of the prompts; before it takes its part, others have taken them all."""

    class Late:
        def add(self, name: str, count: int) -> int:
            return 9 if count == 0 else 10 + count

    assert not Replicas(Late(), 0, 2).take(10, 4)  # type: ignore[arg-type]


def test_parts_are_merged_in_order_and_a_broken_line_is_forgotten(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for replica, indices in ((0, (2, 0)), (3, (4, 1))):
        parts = PartFiles(output, "job")
        parts.open(replica)
        for index in indices:
            parts.add({"index": index, "error": None})
        parts.close()
    with (tmp_path / "out.jsonl.part3").open("ab") as stream:
        stream.write(b'{"index": 3, "err')
    (tmp_path / "out.jsonl.part9").touch()  # it died before its first line
    parts = PartFiles(output, "job")
    assert sorted(parts.finished()) == [0, 1, 2, 4]
    with pytest.raises(UsageError, match="1 of 5 prompts are not finished"):
        parts.merge(5)
    parts.open(3)
    parts.add({"index": 3, "error": "no"})
    assert sorted(parts.finished()) == [0, 1, 2, 4], "what failed is tried again"
    assert parts.merge(5) == 1
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == [output]


def test_two_runs_do_not_write_one_part(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first, second = PartFiles(output, "job"), PartFiles(output, "job")
    first.open(0)
    first.add({"index": 0, "error": None})
    before = (tmp_path / "out.jsonl.part0").read_bytes()
    with pytest.raises(MinillmError, match=r"another run is writing .*out\.jsonl: wait for its end"):
        second.open(0)
    assert (tmp_path / "out.jsonl.part0").read_bytes() == before
    second.open(1)  # another replica
    first.merge(1)
    third = PartFiles(output, "job")
    third.open(0)  # the first has deleted its part, which it still holds
    third.add({"index": 0, "error": None})
    assert sorted(third.finished()) == [0]
    for each in (first, second, third):
        each.close()


def test_links_in_the_place_of_files_to_write_are_not_followed(tmp_path: Path) -> None:
    output, precious = tmp_path / "out", tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "out.merging").symlink_to(precious)
    parts = PartFiles(output, "job")
    parts.open(0)
    parts.add({"index": 0, "error": None})
    assert parts.merge(1) == 0
    assert precious.read_text() == "precious"
    assert not output.is_symlink()
    assert json.loads(output.read_text())["index"] == 0
    (tmp_path / "out.part0").symlink_to(precious)
    with pytest.raises(UsageError, match="symbolic links"):
        PartFiles(output, "job").open(0)
    assert precious.read_text() == "precious"


def test_parts_of_another_job_are_refused(tmp_path: Path) -> None:
    PartFiles(tmp_path / "out", "one").open(0)
    with pytest.raises(UsageError, match="answers to other requests"):
        PartFiles(tmp_path / "out", "two").finished()


@pytest.mark.parametrize("text", ["junk", "[]", "3", "{}", '{"job": "one"}\njunk', '{"job": "one"}\n{}', "[" * 5000])
def test_a_file_that_is_no_part_is_left_alone(tmp_path: Path, text: str) -> None:
    part = tmp_path / "out.part0"
    part.write_text(text + "\n")
    with pytest.raises(UsageError, match="part0 holds no answers"):
        PartFiles(tmp_path / "out", "one").finished()
    with pytest.raises(UsageError, match="part0 holds no answers"):
        PartFiles(tmp_path / "out", "one").open(0)
    assert part.read_text() == text + "\n"


def requests_file(directory: Path, count: int, max_tokens: int) -> Path:
    path = directory / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": f"number {i}", "id": f"line {i}", "max_tokens": max_tokens} for i in range(count)
    ]
    lines[3]["prompt"] = [9999]  # refused: not in the vocabulary
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model: Path, source: Path, output: Path) -> list[str]:
    return [
        "generate", "-f", str(source), "-o", str(output), "--model", str(model), "--device", "cpu",
        "--num-blocks", "64", "--max-num-seqs", "2", "--temperature", "0", "--ignore-eos", "--quiet",
    ]  # fmt: skip


def answers(path: Path) -> list[tuple[int, str, list[list[int]], str | None]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(v["index"], v["request_id"], [o["token_ids"] for o in v["outputs"]], v["error"]) for v in lines]


def test_a_run_that_was_stopped_goes_on(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = requests_file(tmp_path, 8, 5), tmp_path / "out.jsonl"
    assert main(command(tiny_model, source, output)) == 1, "one prompt is refused"
    whole = output.read_text().splitlines()
    assert [entry[:2] for entry in answers(output)] == [(i, f"line {i}") for i in range(8)]
    assert "1 of 8 prompts failed" in capsys.readouterr().err
    # As if it had died with three finished: their answers must not be computed again.
    output.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("minillm.llm.LLM.work_off", _stopped)
        assert main(command(tiny_model, source, output)) == 130
    job = json.loads(output.with_name("out.jsonl.part0").read_text())
    kept = [json.loads(whole[i]) | {"prompt": "kept"} for i in (5, 0, 6)]
    output.with_name("out.jsonl.part0").write_text("".join(json.dumps(line) + "\n" for line in (job, *kept)))
    assert main(command(tiny_model, source, output)) == 1
    assert "5 prompts (3 were finished before)" in capsys.readouterr().err
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] == "kept" for line in again] == [i in (0, 5, 6) for i in range(8)]
    assert [line["outputs"] for line in again] == [json.loads(line)["outputs"] for line in whole]


def _stopped(llm: Any, take: Any) -> Any:
    """`LLM.work_off`, stopped with ctrl-c before its first step."""
    raise KeyboardInterrupt
    yield


@pytest.mark.slow
def test_nothing_that_was_finished_is_lost_with_a_replica(tiny_model: Path, tmp_path: Path) -> None:
    source, output, plain = requests_file(tmp_path, 16, 250), tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    shared = [*command(tiny_model, source, output), "--data-parallel"]
    arguments = torchrun("--standalone", "--nproc-per-node=2", arguments=shared)
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    parts = [tmp_path / f"out.jsonl.part{replica}" for replica in range(2)]

    def lines_of(part: Path) -> list[str]:
        return part.read_text().splitlines()[1:] if part.exists() else []

    while not all(len(lines_of(part)) >= 2 for part in parts) and process.poll() is None:
        time.sleep(0.02)
    os.kill(_replica(process.pid, 1), signal.SIGKILL)
    errors = process.communicate()[1]
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in errors
    finished = {json.loads(line)["index"] for part in parts for line in lines_of(part) if line.endswith("}")}
    assert 4 <= len(finished) < 16
    assert not output.exists()
    result = subprocess.run(arguments, capture_output=True, text=True)
    succeeded = len(finished - {3})
    assert f"{16 - succeeded} prompts ({succeeded} were finished before)" in result.stderr
    assert "by 2 replicas" in result.stderr
    main(command(tiny_model, source, plain))
    assert answers(output) == answers(plain)
    assert not any(part.exists() for part in parts)


def _replica(launcher: int, rank: int) -> int:
    """The process that torchrun has started as ``rank``."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"torchrun has no process of rank {rank}")


def test_replicas_need_a_file_and_torchrun(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = requests_file(tmp_path, 4, 2), tmp_path / "out"
    assert main([*command(tiny_model, source, output), "--data-parallel"]) == 2
    assert "torchrun starts the replicas" in capsys.readouterr().err
    values = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert main(command(tiny_model, source, output)) == 2
    assert "torchrun has started 4 replicas" in capsys.readouterr().err
    assert main(["generate", "-f", str(source), "--data-parallel", "--model", str(tiny_model)]) == 2
    assert "an --output" in capsys.readouterr().err
    assert main([*command(tiny_model, source, output), "--data-parallel", "--tensor-parallel-size", "3"]) == 2
    assert "not a multiple of tensor_parallel_size 3" in capsys.readouterr().err
