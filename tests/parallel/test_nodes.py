"""Several nodes: here, several torchruns on one machine, which know no more of each other than those on two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from lib.torchrun import of_two_ranks, torchrun
from minillm.errors import MinillmError
from minillm.parallel import channel, launch
from minillm.parallel.channel import Listener, RankDied, beat
from minillm.parallel.launch import Torchrun
from minillm.parallel.shared_work import Replicas


def nodes(count: int, *arguments: str) -> Iterator[subprocess.CompletedProcess[str]]:
    """Start ``minillm`` on this many nodes, each with one process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nproc-per-node=1", f"--nnodes={count}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    commands = [torchrun(*options, f"--node-rank={node}", arguments=arguments) for node in range(count)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        for command, process in zip(commands, processes, strict=True):
            out, errors = process.communicate(timeout=120)
            yield subprocess.CompletedProcess(command, process.returncode, out, errors)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_the_ranks_of_a_model_may_be_on_two_nodes(tiny_model: Path) -> None:
    arguments, expected = of_two_ranks(tiny_model)
    first, second = nodes(2, *arguments)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (first.stdout, second.stdout) == (expected, "")


@pytest.mark.slow
def test_replicas_of_two_nodes_share_a_file(tiny_model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"word {number}", "max_tokens": 5}) + "\n" for number in range(12)))
    arguments = ["generate", "--file", str(source), "--output", str(output), "--data-parallel"]
    arguments += ["--model", str(tiny_model), "--device", "cpu", "--num-blocks", "64"]
    first, second = nodes(2, *arguments)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "12 prompts (0 were finished before)" in first.stderr
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == list(range(12))


def test_who_is_silent_is_gone_and_who_beats_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = HashStore(), 0.0
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    listener = Listener(store, every=0.02, silence=0.3)
    beat(store, 0, every=0.02)

    def beats() -> int:
        return store.add(channel._BEATS.format(0), 0)

    def listen_to(*ranks: int) -> None:
        """Look after each beat: the clock of who listens goes on with them, however fast the machine is."""
        nonlocal now
        for _ in range(30):
            before, deadline = beats(), time.monotonic() + 60
            while beats() == before:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            now += 0.05
            listener.check(ranks)

    listen_to(0)
    with pytest.raises(RankDied, match="rank 7 has been silent for"):
        listen_to(0, 7)


def test_who_waits_for_a_replica_that_is_gone_is_told() -> None:
    replicas = Replicas(HashStore(), 0, 2, 4, Listener(HashStore(), every=0.02, silence=0.1))
    with pytest.raises(MinillmError, match="rank 4 has been silent for"):
        replicas.meet("ready")


def test_a_process_that_is_cut_off_from_the_store_ends() -> None:
    program = """
import time
from minillm.parallel.channel import beat

class CutOff:
    def add(self, key, amount):
        time.sleep(60)

beat(CutOff(), 1, silence=0.2)
time.sleep(60)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert result.returncode == 1
    assert result.stderr.startswith("minillm: error: the first node has not answered for 0 s")


def test_a_process_outlives_the_store_if_it_needs_it_no_more() -> None:
    program = """
import time
from minillm.parallel.channel import beat

class Gone:
    def add(self, key, amount):
        raise RuntimeError("closed")

beat(Gone(), 1, silence=1)
time.sleep(2)
print("still there")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout) == (0, "still there\n"), result.stderr


def test_bench_share_ends_in_one_line_when_the_first_node_is_gone() -> None:
    """The second of two replicas on two nodes runs; the first, which has torchrun's store, dies before they begin."""
    program = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=250), wait_for_workers=False)
print(store.port, flush=True)
store.get("minillm/replicas/ready/1")
"""
    first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    torchrun = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": port}
    options = (
        "--shape",
        "smollm2-135m",
        "--device",
        "cpu",
        "--num-requests",
        "2",
        "--scale",
        "0.002",
        "--num-blocks",
        "64",
    )
    second = subprocess.Popen(
        (sys.executable, "-m", "minillm", "bench", "share", *options),
        env={**os.environ, **place, **torchrun}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert first.wait(timeout=250) == 0, "the second has come to where both meet"
        _, errors = second.communicate(timeout=250)
    finally:
        for process in (first, second):
            process.kill()
    assert second.returncode == 1
    lines = [line for line in errors.splitlines() if line.startswith("minillm: error:")]
    assert lines == ["minillm: error: the first node is gone, and the measurements with it"], errors
    assert "Traceback" not in errors


def test_a_node_tells_the_others_an_address_that_is_not_its_own_127(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert Torchrun(0, 4, 0, 4).host() == "127.0.0.1"
    assert Torchrun(0, 4, 0, 4).listener(HashStore()) is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no way to others")
    assert not Torchrun(0, 4, 0, 2).host().startswith("127.")


def test_the_way_to_another_node_may_be_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    ways = {
        "first": "fd77::2",
        "192.0.2.1": "10.1.2.3",
        "2001:db8::1": "fd88::2",
        "loop": "::1",
        "nowhere": "127.0.0.1",
    }
    assert launch._way_out("::1") == "::1"
    assert launch._way_out("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(launch, "_way_out", ways.__getitem__)
    for first, expected in (("first", "fd77::2"), ("loop", "10.1.2.3"), ("nowhere", "10.1.2.3")):
        monkeypatch.setenv("MASTER_ADDR", first)
        assert Torchrun(0, 4, 0, 2).host() == expected
    ways["192.0.2.1"] = "127.0.0.1"
    assert Torchrun(0, 4, 0, 2).host() == "fd88::2"
    with socket.create_server(("::1", 0), family=launch._family("::1")) as server:
        assert server.family == socket.AF_INET6
    assert launch._family("10.1.2.3") == socket.AF_INET
