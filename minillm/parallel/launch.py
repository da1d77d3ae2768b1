"""Start the processes that share a model. Rank 0 starts the others, each with a socket to rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import weakref
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from minillm import system
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.parallel import channel
from minillm.parallel.channel import Leader, RankConnections, RankDied

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from minillm.parallel.collectives import Ranks

_PATIENCE = timedelta(hours=6)  # to wait for a rank that is still downloading the model; a dead rank is noticed earlier


@dataclass(frozen=True)
class Torchrun:
    """The rank of this process among the processes that `torchrun` has started.

    The first of every ``tensor_parallel_size`` ranks runs a model, and starts the model's other processes itself.
    """

    rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Torchrun | None:
        """Read torchrun's environment variables; return None without them. Raises UsageError if they are invalid."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if not all(re.fullmatch(r"[0-9]{1,6}", text) for text in found.values()):
            raise UsageError(f"torchrun's variables are wrong: {found}; use torchrun, or unset TORCHELASTIC_RUN_ID")
        rank, world_size, local_world_size = map(int, found.values())
        if local_world_size < world_size:
            raise UsageError("a model runs on the GPUs of one machine: start torchrun with --nnodes 1")
        return cls(rank, world_size)

    def num_replicas(self, tensor_parallel_size: int) -> int:
        """Return how many copies of the model the processes run. Raises UsageError if processes would be left over."""
        if self.world_size % tensor_parallel_size:
            wrong = f"{self.world_size} processes, not a multiple of tensor_parallel_size {tensor_parallel_size}"
            raise UsageError(f"torchrun has started {wrong}; start another number of them")
        return self.world_size // tensor_parallel_size


def lead(model: str, config: EngineConfig, device: torch.device) -> tuple[Ranks, Leader]:
    """Start the other ranks of ``model``, and connect this process, rank 0 on ``device``, with them.

    On GPUs, the other ranks use the GPUs after ``device``.

    Raises:
        RankDied: a rank ended before it was ready.
    """
    import torch

    from minillm.parallel.collectives import Ranks

    size = config.tensor_parallel_size
    # Ranks on one CPU share its cores: more threads than cores make all of them many times slower.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    connections: dict[int, socket.socket] = {}
    processes: dict[int, subprocess.Popen] = {}
    # Only this user can open it: torch's TCP store listens on all interfaces without a password.
    directory = tempfile.mkdtemp(prefix="minillm-")
    try:
        for rank in range(1, size):
            command = (*system.PYTHON, "-m", "minillm.loading.rank")
            connections[rank], processes[rank] = system.start_connected(command, environment)
            task = {"rank": rank, "local_rank": (device.index or 0) + rank, "directory": directory}
            with contextlib.suppress(OSError):  # the process has already ended, which is noticed below
                data = json.dumps({**task, "model": model, "config": asdict(config)}).encode()
                channel.send_message(connections[rank], data)
        for rank, connection in connections.items():
            try:
                channel.receive_message(connection)
            except EOFError:
                how = system.exit_status(processes[rank].wait())
                raise RankDied(f"rank {rank} of {size} ended{how} before it was ready") from None
    except BaseException:
        for process in processes.values():
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    ranks: list[Ranks] = []
    leader = Leader(RankConnections(connections, processes, lambda: ranks[0].abort() if ranks else None))
    with leader.watched():
        ranks.append(Ranks(open_store(directory), 0, size, device))
    weakref.finalize(ranks[0], shutil.rmtree, directory, ignore_errors=True)
    return ranks[0], leader


def open_store(directory: str) -> Store:
    """Open the store, a file in ``directory``, through which the ranks of one model find each other."""
    from torch.distributed import FileStore

    store = FileStore(os.path.join(directory, "store"))
    store.set_timeout(_PATIENCE)
    return store
