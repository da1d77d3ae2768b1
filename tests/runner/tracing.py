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
from minillm.model.kinds import one_layer_of_each_kind  # noqa: E402
from minillm.runner.device.ahead import Shape  # noqa: E402
from minillm.runner.device.runner import DeviceRunner  # noqa: E402


@torch.inference_mode()
def main() -> None:
    launch.set_target(GPUTarget("cuda", 90, 32))
    model = ours(hf_model(kind="Qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=2))
    runner = DeviceRunner(model, 16, 16, max_num_seqs=8, max_model_len=128, graphs=False, sharing=FREE)
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    found = {variant.key: variant for shape in (*runner.first_shapes(), *runner.shapes()) for variant in missing(shape)}
    assert runner.piecewise is not None
    some = *runner.first_shapes(), next(runner.piecewise.shapes())
    by_layer = {variant.key for shape in some for variant in launch.missing_variants(shape.work)}
    assert by_layer <= found.keys(), "layers of the same kind launch different kernels"
    print(json.dumps(Counter(variant.name for variant in found.values())))


@torch.inference_mode()
def missing(shape: Shape) -> list[launch.Variant]:
    with one_layer_of_each_kind():
        return launch.missing_variants(shape.work)


if __name__ == "__main__":
    main()
