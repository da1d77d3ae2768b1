"""Test several engines on one file: each row is answered once, even if an engine dies; shards; options."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.programs.warm import process_of
from lib.rows import answers, command, requests_file
from lib.terminal import children
from minillm.cli.main import main
from minillm.errors import MinillmError, UsageError
from minillm.jobs.engines import Answer, Died, Engines, Facts
from minillm.jobs.rows import InputRow

pytestmark = pytest.mark.timeout(300)


class Scripted(Engines):
    """Engines that answer, and die, in a random order."""

    def __init__(self, count: int, rng: random.Random, deaths: int) -> None:
        super().__init__(count)
        self.rng, self.deaths = rng, deaths
        self.starting: set[int] = set()
        self.rows: list[deque[InputRow]] = [deque() for _ in range(count)]
        self.most = 0

    def send(self, number: int, rows: list[InputRow]) -> None:
        assert number in self.facts, "it is not ready"
        self.rows[number].extend(rows)
        self.most = max(self.most, len(self.rows[number]))

    def start(self, number: int) -> None:
        self.starting.add(number)
        self.rows[number].clear()

    def receive(self) -> tuple[int, Facts | list[Answer] | Died | MinillmError]:
        number = self.rng.choice([n for n in range(self.count) if n in self.starting or self.rows[n]])
        if self.deaths and self.rng.random() < 0.1:
            self.deaths -= 1
            return number, Died()
        if number in self.starting:
            self.starting.remove(number)
            return number, Facts({"top_k": 5}, 8, "cpu")
        return number, [{"index": self.rows[number].popleft().index}]

    def __exit__(self, *raised: object) -> None:
        pass


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_answered_once_whichever_engines_die(seed: int) -> None:
    rng = random.Random(seed)
    total = rng.randint(0, 300)
    with Scripted(rng.randint(1, 5), rng, deaths=3) as engines:
        assert engines.defaults() == {"top_k": 5}
        found = [answer["index"] for answer in engines.answers([InputRow(i, "x") for i in range(total)])]
    assert sorted(found) == list(range(total))
    assert engines.most <= 8, "as many as it computes at a time"


@pytest.mark.parametrize(("count", "given"), [(4, [2, 3, 3, 4]), (1, [8])])
def test_few_rows_are_given_to_all_engines(count: int, given: list[int]) -> None:
    """An engine gets its share of the rows that are left; the rest goes to engines that answer first."""
    engines = Scripted(count, random.Random(0), deaths=0).__enter__()
    while len(engines.facts) < count:
        assert engines._receive() == []
    shares: list[int] = []
    engines.send = lambda number, rows: shares.append(len(rows)) or engines.rows[number].extend(rows)  # type: ignore[method-assign,func-returns-value]
    next(engines.answers([InputRow(i, "x") for i in range(16)]))
    assert sorted(shares[:count]) == given


def test_an_engine_that_only_dies_ends_the_run() -> None:
    for call in (Engines.defaults, lambda engines: list(engines.answers([InputRow(0, "x")]))):
        with Scripted(1, random.Random(0), deaths=100) as engines:
            engines.rng.random = lambda: 0.0  # type: ignore[method-assign]
            with pytest.raises(MinillmError, match="engine 0 has died 4 times without an answer"):
                call(engines)


def test_an_engine_that_fails_ends_the_run() -> None:
    engines = Scripted(2, random.Random(0), deaths=0)
    engines.receive = lambda: (1, UsageError("no"))  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="engine 1: no"):
        engines.defaults()
    kinds = iter(["cpu", "cuda"])
    engines.receive = lambda: (0, Facts({}, 8, next(kinds)))  # type: ignore[method-assign]
    engines.defaults()
    engines.receive = lambda: (1, Facts({}, 8, next(kinds)))  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="engine 1 has found no GPU of its own: start fewer engines"):
        list(engines.answers([InputRow(0, "x")]))


@pytest.mark.slow
def test_engines_that_are_killed_lose_no_row_and_nothing_is_computed_again(
    tiny_model: Path, tmp_path: Path, forking: Callable[[str], str]
) -> None:
    source, output, plain = requests_file(tmp_path, 24, 150), tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    arguments = [*command(tiny_model, source, output), "--replicas", "2"]
    part = tmp_path / "out.jsonl.part0"

    def finished() -> int:
        return max(0, len(part.read_bytes().splitlines()) - 1) if part.exists() else 0

    def wait_for(count: int, process: subprocess.Popen[str]) -> None:
        while finished() < count and process.poll() is None:
            time.sleep(0.02)

    process = subprocess.Popen([forking("minillm"), *arguments], stderr=subprocess.PIPE, text=True)
    wait_for(3, process)
    os.kill(children(process_of(process.pid))[0], signal.SIGKILL)
    wait_for(8, process)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert process.returncode == 130, errors
    assert "has died of signal 9; another takes its rows" in errors
    assert "the same command resumes the run" in errors
    before = finished()
    assert 8 <= before < 24
    result = subprocess.run([forking("minillm"), *arguments], capture_output=True, text=True)
    assert result.returncode == 1, "one prompt is refused"
    assert "1 of 24 prompts failed" in result.stderr
    assert (
        f"({before} were finished before)" in result.stderr or f"({before - 1} were finished before)" in result.stderr
    )
    main(command(tiny_model, source, plain, batch=24))
    assert answers(output) == answers(plain)
    assert not part.exists()


def test_engines_that_cannot_load_say_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = requests_file(tmp_path, 4, 2), tmp_path / "out"
    assert main([*command(Path("no-such-model"), source, output), "--replicas", "2"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "unknown model 'no-such-model'" in lines[0]
    assert list(tmp_path.iterdir()) == [source]


def test_shards_concatenated_are_the_whole(tiny_model: Path, tmp_path: Path) -> None:
    source, output = requests_file(tmp_path, 11, 3), tmp_path / "out.jsonl"
    arguments = command(tiny_model, source, output)
    main(arguments)
    whole = answers(output)
    output.unlink()
    for index in (2, 0, 1):
        main([*arguments, "--shard", f"{index}/3"])
    shards = sorted(tmp_path.glob("out.*.jsonl"))
    assert [each.name for each in shards] == [f"out.{index}-of-3.jsonl" for index in range(3)]
    assert [line for each in shards for line in answers(each)] == whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "0"], "--replicas must be from 1"),
        (["--replicas", "2", "--ray", "local"], "--replicas starts engines without Ray"),
        (["--engines", "2"], "say --ray ADDRESS as well"),
        (["--ray", "local", "--engines", "0"], "--engines must be from 1"),
        (["--shard", "3/3"], "--shard is I/N with I from 0 to N - 1"),
        (["--shard", "x"], "--shard is I/N"),
        (["--shard", "0/9"], "there are only 4 prompts; use at most 4 shards"),
        (["--replicas", "2", "--device", "cuda:1"], "each replica uses a GPU of its own"),
    ],
)
def test_options_that_contradict_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    source = requests_file(tmp_path, 4, 2)
    assert main([*command(Path("none"), source, tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--replicas", "2"], ["--shard", "0/2"], ["--ray", "local"]])
def test_several_engines_need_an_output_file(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["generate", "a prompt", *options]) == 2
    assert f"{options[0]} needs an --output file" in capsys.readouterr().err


def test_torchrun_starts_the_ranks_of_one_model_on_one_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    arguments = command(Path("none"), requests_file(tmp_path, 4, 2), tmp_path / "out")
    assert main(arguments) == 2
    assert "torchrun has started 4 engines" in capsys.readouterr().err
    assert main([*arguments, "--tensor-parallel-size", "3"]) == 2
    assert "not a multiple of tensor_parallel_size 3" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main([*arguments, "--tensor-parallel-size", "4"]) == 2
    assert "a model runs on the GPUs of one machine" in capsys.readouterr().err


@pytest.mark.usefixtures("modules_fork")
def test_rows_pass_through_json_unchanged(tiny_model: Path, tmp_path: Path) -> None:
    """Parameters of every kind reach an engine in another process as they reach one in this."""
    lines = [
        {"prompt": "one", "n": 2, "temperature": 0.9, "seed": 3, "max_tokens": 6, "logprobs": 2},
        {"prompt": [5, 9, 12], "beam_width": 2, "max_tokens": 5},
        {
            "messages": [{"role": "user", "content": "hi \u2028 \ud83d\ude00"}],
            "max_tokens": 4,
            "temperature": 0,
            "seed": 5,
        },
        {"prompt": "two", "logit_bias": {"7": 100}, "max_tokens": 3, "seed": 9, "stop": ["zzz"]},
        {"prompt": "three", "grammar": {"choice": ["a", "b"]}, "max_tokens": 9, "seed": 1},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for name, more in (("one", []), ("two", ["--replicas", "2"])):
        output = tmp_path / name
        arguments = [each for each in command(tiny_model, source, output) if each not in ("--temperature", "0")]
        assert main([*arguments, *more]) == 0
        found.append([json.loads(line) for line in output.read_text().splitlines()])
    for here, there in zip(*found, strict=True):
        for each in (here, there):
            each.pop("metrics", None)
        assert here == there
    assert [line["error"] for line in found[0]] == [None] * len(lines)
