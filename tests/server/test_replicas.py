"""Test several engines at one address."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.server import ROOT, Server, served
from lib.torchrun import torchrun
from minillm.parallel.placement import place
from minillm.server import replicas
from minillm.server.client import EngineDied
from minillm.server.replicas import PrefixEngines, Replicas, keys_of
from minillm.service.call_messages import (
    CloseSession,
    Complete,
    Conversation,
    OpenSession,
    PinPrefix,
    ReadCache,
    SessionCommand,
    UnpinPrefix,
)

TEXT = "".join(f"{number} " for number in range(500))


def test_a_prompt_goes_where_its_beginning_is() -> None:
    engines = PrefixEngines()
    first = engines.choose(keys_of(TEXT, None), [0, 0, 0])
    assert engines.choose(keys_of("x" * 500, None), [1, 0, 0]) == 1
    assert engines.choose(keys_of(TEXT[:700] + "and so on" * 50, None), [1, 1, 0]) == first
    assert engines.choose(keys_of(TEXT, "salt"), [1, 1, 0]) == 2, "another salt is another prompt"
    assert engines.choose(keys_of(TEXT, None), [50, 1, 9]) == 1, "but not to an engine that has far more to do"
    assert engines.choose([], [3, 2, 1]) == 2


@given(st.text(min_size=300, max_size=900), st.integers(0, 900), st.text(max_size=300))
def test_keys_are_those_of_the_common_beginning(text: str, cut: int, other: str) -> None:
    cut = min(cut, len(text))
    ours, theirs = keys_of(text, None), keys_of(text[:cut] + other, None)
    common = cut + len(os.path.commonprefix([text[cut:], other]))  # noqa: RUF071
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    assert same == common // 128
    assert ours[:same] == theirs[:same]


@pytest.mark.parametrize(("count", "threads"), [(1, 8), (3, 2), (8, 1), (100, 1)])
def test_engines_share_the_cores(count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [*place(0, count, {"device": "cpu"})][-1] == f"OMP_NUM_THREADS={threads}"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert not any("OMP_NUM_THREADS" in each for each in place(0, count, {"device": "cpu"}))


@pytest.mark.parametrize(
    ("visible", "given"),
    [(None, ["0,1", "2,3"]), ("5,3,7", ["5,3", "7,-1"]), ("5", ["5,-1", "-1,-1"]), ("", ["-1,-1", "-1,-1"])],
)
def test_engines_share_the_visible_gpus(visible: str | None, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = [[*place(number, 2, {"device": "cuda", "tensor_parallel_size": 2})][-1] for number in range(2)]
    assert words == [f"CUDA_VISIBLE_DEVICES={each}" for each in given]


def test_pools_of_several_engines_are_told_as_one() -> None:
    found = [
        {"figures": {"used": 3, "block_size": 16, "disk_bytes": 5}, "tables": [{"seq_id": 1}, {"seq_id": 2}]},
        {"figures": {"used": 4, "block_size": 16, "disk_bytes": 7}, "tables": [{"seq_id": 1}]},
    ]
    assert replicas._joined(found) == {
        "figures": {"used": 7, "block_size": 16, "disk_bytes": 7},
        "tables": [{"seq_id": 1, "replica": 0}, {"seq_id": 2, "replica": 0}, {"seq_id": 1, "replica": 1}],
        "replicas": [{"used": 3, "block_size": 16, "disk_bytes": 5}, {"used": 4, "block_size": 16, "disk_bytes": 7}],
    }


def test_conversations_and_ids_have_keys() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT[:300]}]
    longer = [*messages, {"role": "assistant", "content": "x" * 300}]
    keys = keys_of(Conversation(messages), None)
    assert keys
    assert keys_of(Conversation(longer), None)[: len(keys)] == keys
    assert keys_of(Conversation(messages, tools=[{"a": 1}]), None)[0] != keys[0]
    assert [len(keys_of(list(range(count)), None)) for count in (127, 128, 255, 300)] == [0, 1, 1, 2]
    assert keys_of(None, None) == keys_of("short", None) == []
    assert len(keys_of("x" * 1_000_000, None)) == 512, "of long prompts the beginning decides"


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Server]:
    with served(tiny, "--num-blocks", "256", "--replicas", "2") as running:
        yield running
    assert running.process.returncode in (0, 130), "".join(running.said)


def complete(server: Server, prompt: str | None, **more: Any) -> Any:
    body = {"max_tokens": 4, "temperature": 0, **({} if prompt is None else {"prompt": prompt}), **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()


def per_replica(server: Server, name: str) -> list[float]:
    text = httpx.get(f"{server.url}/metrics").text
    return [float(each) for each in re.findall(rf'^minillm_{name}{{replica="\d"}} (\S+)$', text, re.MULTILINE)]


def test_both_work_and_each_finds_what_it_has_computed(pair: Server) -> None:
    assert len(pair.pids) == 3
    prompts = [f"{letter} {TEXT[:300]}" for letter in "abcdefghijkl"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        first = list(pool.map(lambda prompt: complete(pair, prompt, max_tokens=150), prompts))
    pair.wait_until_idle()
    again = [complete(pair, prompt, max_tokens=150) for prompt in prompts]
    for one, other in zip(first, again, strict=True):
        assert one["choices"][0]["text"] == other["choices"][0]["text"]
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * other["usage"]["prompt_tokens"]
    steps = per_replica(pair, "engine_steps_total")
    assert len(steps) == 2
    assert min(steps) > 30, "the work is shared"


def test_a_fork_goes_to_its_answer(pair: Server) -> None:
    for number in range(4):
        answer = complete(pair, f"{number} {TEXT[:200]}", keep=True)
        assert "choices" in complete(pair, None, fork_of=answer["id"]), number
    assert "unknown answer" in complete(pair, None, fork_of="cmpl-unknown")["error"]["message"]


def test_prefixes_belong_to_a_replica(pair: Server) -> None:
    names = []
    for number in range(3):
        pinned = httpx.post(f"{pair.url}/v1/prefixes", json={"prompt": f"pin {number} {TEXT[:200]}"}).json()
        assert pinned["replica"] in (0, 1)
        names.append(pinned["id"])
        answer = complete(pair, f"pin {number} {TEXT[:200]} so")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    tables = httpx.get(f"{pair.url}/v1/cache").json()["tables"]
    assert {table["state"] for table in tables if table["request"] in names} == {"pinned"}
    for name in names:
        assert httpx.delete(f"{pair.url}/v1/prefixes/{name}").json()["deleted"]


def test_sessions_speak_with_one_engine(pair: Server) -> None:
    for _ in range(3):
        with httpx.stream("GET", f"{pair.url}/v1/session", timeout=60) as events:
            lines = events.iter_lines()
            assert "session" in next(lines)
            assert "Loaded" in next(lines)


def health(server: Server) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/health")
    return answer.status_code, answer.json()["status"]


def test_one_engine_serves_while_another_is_started_again(tiny: Path) -> None:
    with served(tiny, "--num-blocks", "64", "--replicas", "2") as running:
        assert httpx.post(f"{running.url}/v1/prefixes", json={"prompt": TEXT[:200]}).json()["replica"] == 0
        with httpx.stream("GET", f"{running.url}/v1/session", timeout=60) as events:
            lines = events.iter_lines()
            next(lines)
            os.kill(running.pids[1], signal.SIGKILL)
            assert len(list(lines)) < 20, "the stream of an engine that has ended ends"
        status, why = health(running)
        assert status == 200
        assert why == "replica 0: the engine's process was killed by signal 9"
        for number in range(4):
            assert complete(running, f"{number} {TEXT[:200]}")["choices"]
        assert httpx.get(f"{running.url}/v1/prefixes").json()["data"] == [], "what it kept is gone"
        running.wait_until(lambda: health(running) == (200, "ok"))
        assert len(running.pids) == 3

        def both_work() -> bool:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda number: complete(running, f"{number} x", max_tokens=60), range(8)))
            assert all(answer["choices"] for answer in answers)
            return min(per_replica(running, "engine_steps_total")) > 5

        running.wait_until(both_work)
    assert sum("restarting it" in line for line in running.said) == 1
    assert "Traceback" not in "".join(running.said)


@pytest.fixture(scope="module")
def lone(tiny: Path) -> Iterator[Server]:
    with served(tiny, "--num-blocks", "256", "--grace", "0") as running:
        yield running


def test_an_engine_that_is_stopped_is_told_by_health(lone: Server) -> None:
    engine = lone.pids[1]
    name = httpx.post(f"{lone.url}/v1/prefixes", json={"prompt": TEXT[:200]}).json()["id"]
    os.kill(engine, signal.SIGSTOP)
    try:
        lone.wait_until(lambda: health(lone)[0] == 503)
        assert "has not answered for" in health(lone)[1]
        answer = httpx.post(f"{lone.url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503, "new requests do not hang"
        assert httpx.get(f"{lone.url}/v1/cache").status_code == 503
        assert httpx.get(f"{lone.url}/v1/session").status_code == 503, "nobody would answer its questions"
        assert httpx.delete(f"{lone.url}/v1/prefixes/{name}").status_code == 503
    finally:
        os.kill(engine, signal.SIGCONT)
    lone.wait_until(lambda: health(lone) == (200, "ok"))
    assert httpx.delete(f"{lone.url}/v1/prefixes/{name}").json()["deleted"], "it is still pinned, and still listed"
    assert complete(lone, "a")["choices"]
    assert lone.pids[1] == engine


def test_a_killed_engine_is_started_again_and_its_requests_are_told(lone: Server) -> None:
    body = {"prompt": "a", "max_tokens": 450, "ignore_eos": True}

    def ask(streamed: bool) -> tuple[int, str]:
        answer = httpx.post(f"{lone.url}/v1/completions", json={**body, "stream": streamed}, timeout=60)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, streamed) for streamed in (False, True)]
        lone.wait_until(lambda: lone.figure("seats_taken") == 2)
        time.sleep(0.2)
        os.kill(lone.pids[1], signal.SIGKILL)
        (status, text), (streamed_status, events) = [each.result() for each in answers]
    why = "the engine's process was killed by signal 9; send the request again later"
    assert (status, json.loads(text)["error"]["message"]) == (503, why)
    if streamed_status == 200:  # it had begun
        assert why in events.strip().splitlines()[-1]
        assert "[DONE]" not in events
    else:
        assert why in events
    lone.wait_until(lambda: health(lone) == (200, "ok"))
    assert complete(lone, "a")["choices"]


def test_a_stream_that_outlasts_the_grace_ends_with_an_error(tiny: Path) -> None:
    body = {"prompt": "a", "max_tokens": 450, "n": 8, "ignore_eos": True, "stream": True}
    with served(tiny, "--num-blocks", "256", "--grace", "0") as running:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as events:
            lines = (line for line in events.iter_lines() if line.startswith("data: "))
            assert "choices" in next(lines)
            running.process.send_signal(signal.SIGINT)
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"
        running.process.wait(60)
    assert "Traceback" not in "".join(running.said)


class Ending:
    """An engine that loads, or does not, and ends at once."""

    def __init__(self, loads: bool) -> None:
        self.failure, self.trouble = EngineDied("it has ended"), "it has ended"
        self.answers: dict[str, Any] = {}
        self.ended = asyncio.Event()
        self.ended.set()
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if loads:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(EngineDied("it cannot be loaded"))

    async def stop(self) -> None:
        pass


@pytest.mark.anyio
@pytest.mark.parametrize("loads", [True, False, None])
async def test_an_engine_that_ends_again_and_again_is_given_up(
    loads: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(replicas.asyncio, "sleep", sleep)
    begun: list[int] = []

    async def begin(number: int) -> Any:
        begun.append(number)
        if loads is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return Ending(loads)

    engines: Any = [Ending(True), Ending(True)]
    both = Replicas(begin, engines)
    both._keeping = [asyncio.create_task(both._keep(number)) for number in range(2)]
    await asyncio.wait_for(both.ended.wait(), 10)
    assert sorted(waits) == [0, 0, 1, 1, 3, 3, 7, 7, 15, 15], "each time later"
    assert sorted(begun) == [0] * 5 + [1] * 5
    assert not both.serves
    printed = capsys.readouterr().err
    assert printed.count("is not restarted") == 2
    assert ("Too many open files" in printed) == (loads is None)


class Recording:
    """An engine that records its calls."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.answers: dict[str, Any] = {}
        self.calls: list[Any] = []

    def send(self, call: Any) -> None:
        self.calls.append(call)

    def complete(self, call: Any, news: asyncio.Event) -> None:
        self.calls.append(call)

    async def ask(self, make: Any) -> Any:
        self.calls.append(make("call"))
        return {"id": "prefix"}


@pytest.mark.anyio
async def test_sessions_and_prefixes_stay_with_their_engine_however_many_requests_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "_MOST_ANSWERS", 3)
    engines: Any = [Recording(), Recording()]
    engines[0].answers = dict.fromkeys("abc")  # it has more to do
    both = Replicas(lambda number: engines[number], engines)
    both.send(OpenSession("session", ""))
    await both.ask(lambda name: PinPrefix(name, "", "a"))
    for number in range(5):
        both.complete(Complete(str(number), "", "a", {}), asyncio.Event())
    engines[1].calls.clear()
    both.send(SessionCommand("session", b"{}"))
    both.send(CloseSession("session"))
    await both.ask(lambda name: UnpinPrefix(name, "prefix"))
    assert [type(call) for call in engines[1].calls] == [SessionCommand, CloseSession, UnpinPrefix]
    assert not both._open_engines


@pytest.mark.anyio
async def test_the_cache_of_engines_that_have_ended_cannot_be_read() -> None:
    engines: Any = [Recording("it has ended"), Recording("it has ended")]
    with pytest.raises(EngineDied, match="replica 0: it has ended; replica 1: it has ended"):
        await Replicas(lambda number: engines[number], engines).ask(ReadCache)


def test_torchruns_processes_are_the_replicas(minillm_command: tuple[str, ...], tiny: Path) -> None:
    arguments = ["serve", str(tiny), "--port", "0", "--device", "cpu", "--num-blocks", "64"]
    command = torchrun(minillm_command[0], arguments)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    late = threading.Timer(120, process.kill)
    late.start()
    try:
        assert process.stderr is not None
        found = next(each for line in process.stderr if (each := re.search(r"2 replicas\) at (\S+)/v1", line)))
        server = Server(process, found[1])
        assert complete(server, "one two")["choices"]
        assert len(per_replica(server, "cache_blocks")) in (1, 2)
        process.terminate()
        process.stderr.read()
        process.wait(60)
    finally:
        late.cancel()
        process.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--replicas", "0"], "--replicas must be from 1"), (["--replicas", "2", "--device", "cuda:1"], "give 'cuda'")],
)
def test_wrong_numbers_are_refused(minillm_command: tuple[str, ...], tiny: Path, options: list[str], said: str) -> None:
    command = [*minillm_command, "serve", str(tiny), "--port", "0", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
