"""Several engines behind one address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_server import ROOT, Server, served

from minillm.server.messages import Conversation
from minillm.server.replicas import Places, keys_of

TEXT = "".join(f"{number} " for number in range(500))


def test_a_prompt_goes_where_its_beginning_is() -> None:
    places = Places()
    first = places.choose(keys_of(TEXT, None), [0, 0, 0])
    assert places.choose(keys_of("x" * 500, None), [1, 0, 0]) == 1
    assert places.choose(keys_of(TEXT[:700] + "and so on" * 50, None), [1, 1, 0]) == first
    assert places.choose(keys_of(TEXT, "salt"), [1, 1, 0]) == 2, "another salt is another prompt"
    assert places.choose(keys_of(TEXT, None), [50, 1, 9]) == 1, "but not to an engine that has far more to do"
    assert places.choose([], [3, 2, 1]) == 2


@given(st.text(min_size=300, max_size=900), st.integers(0, 900), st.text(max_size=300))
def test_keys_are_those_of_the_common_beginning(text: str, cut: int, other: str) -> None:
    cut = min(cut, len(text))
    ours, theirs = keys_of(text, None), keys_of(text[:cut] + other, None)
    common = cut + len(os.path.commonprefix([text[cut:], other]))  # noqa: RUF071
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    assert same == common // 128
    assert ours[:same] == theirs[:same]


def test_conversations_and_ids_have_keys() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT[:300]}]
    longer = [*messages, {"role": "assistant", "content": "x" * 300}]
    keys = keys_of(Conversation(messages), None)
    assert keys
    assert keys_of(Conversation(longer), None)[: len(keys)] == keys
    assert keys_of(Conversation(messages, tools=[{"a": 1}]), None)[0] != keys[0]
    assert len(keys_of(list(range(300)), None)) == 2
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
    assert "no answer" in complete(pair, None, fork_of="cmpl-unknown")["error"]["message"]


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


def test_the_server_ends_with_one_engine(tiny: Path) -> None:
    with served(tiny, "--num-blocks", "64", "--replicas", "2") as running:
        os.kill(running.pids[2], signal.SIGKILL)
        assert running.process.wait(60) == 1
    said = [line for line in running.said if "engine" in line]
    assert len(said) == 1
    assert "Traceback" not in "".join(running.said)


def test_torchruns_processes_are_the_replicas(tiny: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minillm"]
    command += ["serve", str(tiny), "--port", "0", "--device", "cpu", "--num-blocks", "64"]
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
    [(["--replicas", "0"], "--replicas must be from 1"), (["--replicas", "2", "--device", "cuda:1"], "say 'cuda'")],
)
def test_wrong_numbers_are_refused(tiny: Path, options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "minillm", "serve", str(tiny), "--port", "0", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
