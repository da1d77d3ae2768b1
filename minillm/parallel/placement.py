"""Assign GPUs and cores to several engines on one machine."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from minillm.errors import UsageError

_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def place(number: int, count: int, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of an ``env`` command that gives engine ``number`` of ``count`` its own GPUs or cores.

    An example is ``env CUDA_VISIBLE_DEVICES=1``. The command line of the engine must follow these words. ``options``
    are the engine's options. Raises UsageError if they name one GPU, such as "cuda:0".
    """
    device, size = options.get("device", "auto"), options.get("tensor_parallel_size", 1)
    if ":" in device:
        raise UsageError(f"device {device!r}: each replica uses a GPU of its own; give 'cuda'")
    yield "env"
    for name in _TORCHRUN:  # torchrun's variables would make each engine a rank of one model
        yield from ("-u", name)
    if "OMP_NUM_THREADS" not in os.environ:
        yield f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // count)}"
    if device == "cpu":
        return
    own, visible = range(number * size, (number + 1) * size), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in own]
    if visible is not None:  # an empty list hides all GPUs
        seen = [each for each in visible.split(",") if each]
        names = [seen[i] if i < len(seen) else "-1" for i in own]
    yield f"CUDA_VISIBLE_DEVICES={','.join(names)}"
