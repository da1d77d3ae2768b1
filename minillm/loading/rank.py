"""The process of a rank other than 0. It computes the steps that rank 0 sends, until rank 0 has finished.

Rank 0 starts this process as ``python -m minillm.loading.rank``, with the number of its end of a socket to rank 0. The
first message of rank 0 is this process's task, as JSON.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from minillm.config import EngineConfig
from minillm.errors import MinillmError, memory_errors
from minillm.loading.build import build_runner
from minillm.loading.describe import describe
from minillm.loading.device import choose_device
from minillm.parallel.channel import Follower, receive_message, send_message
from minillm.parallel.collectives import Ranks
from minillm.parallel.launch import open_store
from minillm.runner import wire
from minillm.runner.sharded_blocks import ShardedBlocks
from minillm.runner.step import StepWork
from minillm.system import parent_socket


def follow(follower: Follower, task: Mapping[str, Any]) -> NoReturn:
    """Build this rank's runner, and run the steps that rank 0 sends. End the process when rank 0 has finished.

    An error here is sent to rank 0, which raises it.
    """
    status = 0
    try:
        with memory_errors():
            config = EngineConfig(**task["config"])
            device = choose_device(config, task["local_rank"])
            ranks = Ranks(open_store(task["directory"]), task["rank"], config.tensor_parallel_size, device)
            runner, _ = build_runner(describe(task["model"], config), config, device, ranks)
            blocks = ShardedBlocks(runner)
            for message in follower.messages():
                work = wire.decode(message)
                if isinstance(work, StepWork):
                    runner.observed(work)
                else:
                    blocks.follow(work)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other ranks may wait for this rank in an all-reduce
    except Exception as error:
        follower.fail(str(error) if isinstance(error, MinillmError) else f"{type(error).__name__}: {error}")
        status = 1
    # sys.exit could wait for other ranks, on the device or in a thread of the process group.
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    connection = parent_socket()
    try:
        task = json.loads(receive_message(connection))
    except EOFError:  # rank 0 has ended
        sys.exit(1)
    follower = Follower(connection, task["directory"])  # first of all: from now on, this process ends with rank 0
    try:
        send_message(connection, b"")
    except OSError:  # rank 0 has ended
        threading.Event().wait()  # until ``follower`` ends this process
    follow(follower, task)


if __name__ == "__main__":
    main()
