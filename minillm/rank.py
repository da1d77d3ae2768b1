"""A rank that rank 0 has started: ``python -m minillm.rank``, its task as JSON on standard input."""

from __future__ import annotations

import json
import sys


def main() -> None:
    task = json.loads(sys.stdin.read())
    from minillm.parallel.launch import LOCAL, PATIENCE, connect

    follower = connect(task, task["rank"])  # first: from here on each end sees the other die

    from torch.distributed import PrefixStore, TCPStore

    from minillm.config import EngineConfig, choose_device
    from minillm.load import follow

    config = EngineConfig(**task["config"])
    store = TCPStore(task["host"], task["store"], timeout=PATIENCE)
    device = choose_device(config, task["rank"])
    follow(follower, PrefixStore("collectives", store), task["rank"], task["model"], config, device, LOCAL)


if __name__ == "__main__":
    main()
