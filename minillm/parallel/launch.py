"""Connect the processes that share a model: rank 0 starts the others, or `torchrun` has started all of them.

If torchrun starts more processes than one model needs, every ``tensor_parallel_size`` consecutive ranks share a model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.parallel import channel
from minillm.parallel.channel import Follower, Leader, Lines, RankDied
from minillm.system import child_environment

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from minillm.parallel.collectives import Ranks

LOCAL = "127.0.0.1"
PATIENCE = timedelta(hours=6)  # to wait for a rank that is still downloading the model; a dead rank is noticed earlier
_TORCHRUN_SECONDS = 10.0  # for torchrun's store to answer: it exists before the processes that torchrun starts
_RANK_SECONDS = 60.0  # for another rank's store, which starts at the same time
_UNSET = "or unset TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Torchrun:
    """The rank of this process among the processes that `torchrun` has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Torchrun | None:
        """Read torchrun's environment variables; return None without them. Raises UsageError if they are invalid."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        for name, text in found.items():
            if not re.fullmatch(r"[0-9]{1,6}", text):
                raise UsageError(f"{name} is {text[:40]!r}, but must be a number: start this with torchrun, {_UNSET}")
        self = cls(*map(int, found.values()))
        if not (self.rank < self.world_size and self.local_rank < self.local_world_size <= self.world_size):
            raise UsageError(f"torchrun's environment contradicts itself ({found}): start this with torchrun, {_UNSET}")
        if self.local_world_size < self.world_size:
            raise UsageError("a model runs on the GPUs of one machine: start torchrun with --nnodes 1")
        return self

    def num_replicas(self, tensor_parallel_size: int) -> int:
        """Return how many copies of the model the processes run. Raises UsageError if processes would be left over."""
        if self.world_size % tensor_parallel_size:
            wrong = f"{self.world_size} processes, not a multiple of tensor_parallel_size {tensor_parallel_size}"
            raise UsageError(f"torchrun has started {wrong}; start another number of them")
        return self.world_size // tensor_parallel_size

    def store(self) -> Store:
        """Open the store that all processes share, on a new connection. Raises UsageError if it does not answer."""
        from torch.distributed import rendezvous

        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        try:
            from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if from_torchrun or self.rank:
                _knock(host, int(port), _TORCHRUN_SECONDS if from_torchrun else _RANK_SECONDS)
            return next(rendezvous("env://", timeout=PATIENCE))[0]
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            where = f"MASTER_ADDR {host[:100]!r}, MASTER_PORT {port[:40]!r}"
            raise UsageError(f"torchrun's store does not answer ({where}): {error}; start this with torchrun") from None


def _knock(host: str, port: int, seconds: float) -> None:
    """Connect to ``host`` and close the connection, to fail early: torch itself would retry for `PATIENCE`.

    Raises:
        OSError, OverflowError, UnicodeError: the host does not answer within ``seconds``, or the address is invalid.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), seconds).close()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def lead(model: str, config: EngineConfig, device: torch.device, torchrun: Torchrun | None) -> tuple[Ranks, Leader]:
    """Connect this process, as rank 0, with the other ranks of ``model``. Without ``torchrun``, start them first.

    Raises:
        RankDied: a rank ended before it was ready.
    """
    from torch.distributed import PrefixStore

    from minillm.parallel.collectives import Ranks

    size, secret = config.tensor_parallel_size, secrets.token_hex(16)
    processes: dict[int, subprocess.Popen] = {}
    connections: dict[int, socket.socket] = {}
    directory = None
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        try:
            if torchrun is None:
                # Only this user can open it: torch's TCP store listens on all interfaces without a password.
                directory = tempfile.mkdtemp(prefix="minillm-")
                store: Store = open_store(directory)
                address = {"port": port, "secret": secret, "directory": directory}
                for rank in range(1, size):
                    processes[rank] = _start({**address, "rank": rank, "model": model, "config": asdict(config)})
            else:
                store = PrefixStore(f"minillm/{torchrun.rank}", torchrun.store())
                store.set("address", json.dumps({"port": port, "secret": secret}))
            server.settimeout(0.2)
            while len(connections) < size - 1:
                _accept(server, secret, connections)
                for rank, process in processes.items():
                    if rank not in connections and (code := process.poll()) is not None:
                        raise RankDied(f"rank {rank} of {size} ended with exit code {code} before it was ready")
        except BaseException:
            for process in processes.values():
                process.kill()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
    ranks: list[Ranks] = []
    leader = Leader(Lines(connections, processes, lambda: ranks[0].abort() if ranks else None))
    with leader.watched():
        ranks.append(Ranks(PrefixStore("collectives", store), 0, size, device))
    if directory is not None:
        weakref.finalize(ranks[0], shutil.rmtree, directory, ignore_errors=True)
    return ranks[0], leader


def open_store(directory: str) -> Store:
    """Open the store, a file in ``directory``, through which the ranks of one model find each other."""
    from torch.distributed import FileStore

    store = FileStore(os.path.join(directory, "store"))
    store.set_timeout(PATIENCE)
    return store


def join(torchrun: Torchrun, size: int) -> tuple[Follower, Store, int]:
    """Connect this process, started by torchrun, to rank 0 of its model.

    Returns:
        The connection, the store for collectives, and this process's rank among the ranks of its model.
    """
    from torch.distributed import PrefixStore

    rank = torchrun.rank % size
    store = PrefixStore(f"minillm/{torchrun.rank - rank}", torchrun.store())
    address = json.loads(store.get("address"))
    return connect(address, rank), PrefixStore("collectives", store), rank


def connect(address: Mapping[str, str | int], rank: int) -> Follower:
    """Connect to rank 0. ``address`` has rank 0's port and secret.

    It may also name a directory, which is removed if rank 0 dies.
    """
    connection = socket.create_connection((LOCAL, int(address["port"])), timeout=30)
    connection.settimeout(None)
    channel.set_up(connection)
    channel.send_message(connection, json.dumps({"rank": rank, "secret": address["secret"]}).encode())
    return Follower(connection, str(address.get("directory", "")))


def _accept(server: socket.socket, secret: str, connections: dict[int, socket.socket]) -> None:
    """Accept a waiting connection, if any. Add it to ``connections`` if it sends the secret, else close it."""
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return
    connection.settimeout(5)
    with contextlib.suppress(EOFError, ValueError, KeyError, TypeError):
        hello = json.loads(channel.receive_message(connection))
        rank = int(hello["rank"])
        if secrets.compare_digest(hello["secret"], secret) and rank not in connections:
            connection.settimeout(None)
            channel.set_up(connection)
            connections[rank] = connection
            return
    connection.close()


def _start(task: Mapping[str, object]) -> subprocess.Popen:
    """Start the process of another rank: `minillm.loading.rank`, which reads ``task`` from standard input."""
    import torch

    process = subprocess.Popen(
        # -P: a module of the current directory must not replace one of the standard library.
        (sys.executable, "-P", "-m", "minillm.loading.rank"),
        # Ranks on one CPU share its cores: more threads than cores make all of them many times slower.
        env={**child_environment(), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdin=subprocess.PIPE,
        stdout=2,  # stdout is for answers
        process_group=0,  # only rank 0 handles ctrl-c: the others end with it
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has already ended, which `lead` notices
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
    return process
