"""Test engines on a local Ray cluster: each row once, even if an actor or driver dies; `Generate` in Ray Data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.rows import answers, command, requests_file
from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.cli.main import main
from minillm.jobs.engines import Facts, Task
from minillm.jobs.rows import InputRow, Style

ray = pytest.importorskip("ray")
from minillm.ray import Generate, RayEngines, connect  # noqa: E402

pytestmark = [pytest.mark.timeout(580), pytest.mark.xdist_group("ray")]


def command_line(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def processes(session: int, name: bytes = b"") -> list[int]:
    """Return the processes of a session with command lines that begin with ``name``."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            in_session = entry.name.isdigit() and os.getsid(int(entry.name)) == session
            if in_session and command_line(int(entry.name)).startswith(name):
                found.append(int(entry.name))
    return sorted(found)


def actors(session: int) -> list[int]:
    return processes(session, b"ray::_Actor")


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Sessions to end with the test: a killed driver may leave processes of its cluster for a while."""
    sessions: list[int] = []
    yield sessions
    for session in sessions:
        for process in processes(session):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_no_row_is_lost_or_computed_twice_whoever_is_killed(tiny_model: Path, tmp_path: Path, ended: list[int]) -> None:
    source, output, plain = requests_file(tmp_path, 200, 30), tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    arguments = [sys.executable, "-m", "minillm", *command(tiny_model, source, output)]
    arguments += ["--ray", "local", "--engines", "2"]
    part = tmp_path / "out.jsonl.part0"

    def finished() -> int:
        return max(0, len(part.read_bytes().splitlines()) - 1) if part.exists() else 0

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
        ended.append(process.pid)
        return process

    def wait_for(count: int, process: subprocess.Popen[str]) -> None:
        while finished() < count and process.poll() is None:
            time.sleep(0.02)

    process = start()
    wait_for(20, process)
    assert not [each for each in processes(process.pid) if b"monitor.py" in command_line(each)], "it is without use"
    os.kill(actors(process.pid)[0], signal.SIGKILL)
    wait_for(60, process)
    process.kill()
    process.communicate()
    before = finished()
    assert 60 <= before < 200
    process = start()
    wait_for(110, process)
    os.kill(actors(process.pid)[-1], signal.SIGKILL)
    errors = process.communicate()[1]
    assert process.returncode == 1, errors  # one prompt is refused
    assert "1 of 200 prompts failed" in errors
    assert "were finished before)" in errors
    assert "has died; another takes its rows" in errors
    main(command(tiny_model, source, plain, batch=50))
    assert answers(output) == answers(plain)
    assert not part.exists()


def test_a_batch_of_columns_is_answered_row_by_row(tiny_model: Path) -> None:
    """Call `Generate` as Ray Data does, without a cluster: several batches at a time, and rows that fail alone."""
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 64}
    generate = Generate(str(tiny_model), {"temperature": 0, "max_tokens": 6, "ignore_eos": True}, **options)
    rows: list[dict[str, Any]] = [
        {"prompt": "one", "messages": None, "params": None, "id": 1},
        {"prompt": "two", "messages": None, "params": {"max_tokens": 3, "n": None}, "id": 2},
        {"prompt": None, "messages": [{"role": "user", "content": "hi"}], "params": None, "id": 3},
        {"prompt": None, "messages": None, "params": None, "id": 4},
        {"prompt": "x", "messages": None, "params": {"max_tokens": -1}, "id": 5},
        {"prompt": "x", "messages": None, "params": "{", "id": 6},
    ]

    def columns(of: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        return {name: np.array([row[name] for row in of] + [None], dtype=object)[:-1] for name in of[0]}

    async def both() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        async def one(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return [found async for found in generate(batch)].pop()

        return await asyncio.gather(one(columns(rows[:4])), one(columns(rows[4:])))

    first, second = asyncio.run(both())
    llm = LLM(str(tiny_model), **options)
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    prompts: list[Any] = ["one", "two", llm.tokenizer.apply_chat_template(rows[2]["messages"])]
    params = [SamplingParams(max_tokens=count, **greedy) for count in (6, 3, 6)]
    expected = [output.text for output in llm.generate(prompts, params)]
    assert list(first["text"]) == [*expected, ""]
    assert list(first["id"]) == [1, 2, 3, 4]
    assert list(first["num_tokens"]) == [6, 3, 6, 0]
    assert list(first["finish_reason"]) == ["length"] * 3 + [""]
    assert [bool(each) for each in (*first["error"], *second["error"])] == [False] * 3 + [True] * 3
    assert 'either "prompt" or "messages"' in first["error"][3]
    assert "max_tokens" in second["error"][0]


def test_values_of_rows_may_be_nested_arrays_or_no_objects(tiny_model: Path) -> None:
    generate = Generate(str(tiny_model), {"max_tokens": 2}, device="cpu", num_blocks=64)
    parts = np.array([{"type": "text", "text": "hi"}], dtype=object)  # nested lists are arrays in batches of Ray
    messages = np.array([{"role": "user", "content": parts}], dtype=object)
    choice = {"grammar": {"choice": np.array(["a", "b"], dtype=object)}}
    given: list[dict[str, Any]] = [
        {"messages": messages},
        {"prompt": "x", "params": choice},
        {"prompt": "x", "params": "null"},
        {"prompt": "x", "params": "[1]"},
        {"prompt": "x", "params": "[" * 100_000},
    ]

    async def answers() -> list[str]:
        return [(await generate._row(row))["error"] for row in given]

    errors = asyncio.run(answers())
    assert errors[:3] == ["", "", ""]
    assert errors[3] == "params must be an object, not [1]"
    assert errors[4] == "params is not JSON: it is nested too deeply"


class Stub:
    """An engine that answers 16 rows in 10 ms."""

    def __init__(self, task: Any) -> None:
        self.left: deque[InputRow] = deque()

    def load(self) -> Facts:
        return Facts({}, 256, "cpu")

    def exchange(self, rows: list[InputRow]) -> list[dict[str, Any]]:
        time.sleep(0.01)
        self.left.extend(rows)
        return [{"index": self.left.popleft().index, "by": os.getpid()} for _ in range(min(16, len(self.left)))]


@pytest.mark.soak
def test_ten_thousand_rows_and_twenty_killed_engines() -> None:
    rng = random.Random(0)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
    with RayEngines(Task("stub", {"device": "cpu"}, Style()), 2, "local", Stub) as engines:
        engines.defaults()
        when = sorted(rng.sample(range(9_000), 20))
        found: list[int] = []
        killed: set[int] = set()
        began = time.monotonic()
        for answer in engines.answers([InputRow(i, f"row {i}") for i in range(10_000)]):
            found.append(answer["index"])
            if when and len(found) >= when[0] and answer["by"] not in killed:
                when.pop(0)
                killed.add(answer["by"])
                os.kill(answer["by"], signal.SIGKILL)
        seconds = time.monotonic() - began
    print(f"{len(found) / seconds:.0f} rows a second")
    assert sorted(found) == list(range(10_000))
    assert len(killed) == 20


@pytest.mark.soak
def test_ray_data_maps_batches_with_it(tiny_model: Path) -> None:
    connect("local")
    try:
        rows = [{"id": i, "prompt": f"number {i}"} for i in range(12)]
        rows[5] = {"id": 5, "prompt": "number 5", "params": json.dumps({"beam_width": 3, "max_tokens": 4})}
        model = {
            "model": str(tiny_model),
            "params": {"temperature": 0, "max_tokens": 4},
            "device": "cpu",
            "num_blocks": 64,
        }
        found = ray.data.from_items([{"params": "", **row} for row in rows]).map_batches(
            Generate, fn_constructor_kwargs=model, batch_size=4, compute=ray.data.ActorPoolStrategy(size=1)
        )
        texts = {row["id"]: row["text"] for row in found.iter_rows()}
    finally:
        ray.shutdown()
    llm = LLM(str(tiny_model), device="cpu", num_blocks=64)
    plain = llm.generate([str(row["prompt"]) for row in rows], SamplingParams(temperature=0, max_tokens=4))
    [beam] = llm.beam_search("number 5", BeamSearchParams(beam_width=3, max_tokens=4))
    assert texts == {i: beam.text if i == 5 else plain[i].text for i in range(12)}


def test_without_ray_one_line_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "minillm.ray", raising=False)
    assert main([*command(Path("none"), requests_file(tmp_path, 4, 2), tmp_path / "out"), "--ray", "auto"]) == 2
    assert "Ray is not installed: pip install" in capsys.readouterr().err


def test_a_cluster_that_cannot_be_reached_is_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray tries for three minutes"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        job = [*command(Path("none"), requests_file(tmp_path, 4, 2), tmp_path / "out"), "--ray", address]
        assert main(job) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"--ray {address}: cannot reach the cluster: " in line
        assert "Connection refused" in line


@pytest.mark.parametrize(
    ("module", "imported"),
    [("minillm", []), ("minillm.cli.generate", []), ("minillm.jobs.engine_processes", []), ("minillm.ray", ["ray"])],
)
def test_nothing_else_imports_ray_and_a_driver_imports_no_torch(module: str, imported: list[str]) -> None:
    program = f"import sys, {module}; print(sorted({{'ray', 'torch'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == f"{imported}\n", result.stderr
