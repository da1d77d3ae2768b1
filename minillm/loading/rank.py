"""The process of a rank other than 0. It computes the steps that rank 0 sends, until rank 0 has finished.

Rank 0 starts this process as ``python -m minillm.loading.rank``, with its task as JSON on standard input. Under
torchrun, the process runs the same command as rank 0, and calls `follow`.
"""

import json
import os
import signal
import sys
import threading
from typing import NoReturn

import torch
from torch.distributed import PrefixStore, Store

from minillm.config import EngineConfig
from minillm.errors import MinillmError, memory_errors
from minillm.loading.build import build_runner
from minillm.loading.describe import describe
from minillm.loading.device import choose_device
from minillm.parallel.channel import Follower
from minillm.parallel.collectives import Ranks
from minillm.parallel.launch import connect, open_store
from minillm.runner import wire


def follow(
    follower: Follower, store: Store, rank: int, name: str, config: EngineConfig, device: torch.device
) -> NoReturn:
    """Build this rank's runner, and run the steps that rank 0 sends. End the process when rank 0 has finished.

    An error here is sent to rank 0, which raises it.
    """
    status = 0
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends ctrl-c to all ranks; this one ends with rank 0
    try:
        with memory_errors():
            ranks = Ranks(store, rank, config.tensor_parallel_size, device)
            runner, _ = build_runner(describe(name, config), config, device, ranks)
            for message in follower.messages():
                runner.observed(wire.decode(message))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other ranks may wait for this rank in an all-reduce
    except Exception as error:
        follower.fail(str(error) if isinstance(error, MinillmError) else f"{type(error).__name__}: {error}")
        status = 1
    # sys.exit could wait for other ranks, on the device or in a thread of the process group.
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    task = json.loads(sys.stdin.read())
    follower = connect(task, task["rank"])  # first of all: from now on, each process notices if the other dies
    config = EngineConfig(**task["config"])
    store = open_store(task["directory"])
    device = choose_device(config, task["rank"])
    follow(follower, PrefixStore("collectives", store), task["rank"], task["model"], config, device)


if __name__ == "__main__":
    main()
