"""Find the kernels of every shape of a tiny model's steps, for a 9.0 that this machine lacks. Print counts by name.

Tensors are on the CPU, but claim to be on a GPU, so that every op chooses its kernel. Nothing is launched.
"""

from __future__ import annotations

import json
from collections import Counter

import torch
from triton.backends.compiler import GPUTarget

IS_AVAILABLE = torch.cuda.is_available
torch.cuda.is_available = lambda: True  # `minillm.kernels` looks when it is imported
from minillm.kernels import launch  # noqa: E402

torch.cuda.is_available = IS_AVAILABLE
from lib.models import hf_model, ours  # noqa: E402
from minillm.kernels.attention.plan import FREE  # noqa: E402
from minillm.runner.device.runner import DeviceRunner  # noqa: E402


def main() -> None:
    launch.set_target(GPUTarget("cuda", 90, 32))
    runner = DeviceRunner(
        ours(hf_model()), 16, 16, max_num_seqs=8, max_model_len=128, graphs=False, sharing=FREE
    )  # fmt: skip
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    found: dict[str, launch.Variant] = {}
    with torch.inference_mode():
        for shape in (*runner.first_shapes(), *runner.shapes()):
            found |= {variant.key: variant for variant in launch.missing_variants(shape.work)}
    print(json.dumps(Counter(variant.name for variant in found.values())))


if __name__ == "__main__":
    main()
