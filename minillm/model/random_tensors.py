"""Random weights with a checkpoint's shapes (``load_format="dummy"``), for speed tests."""

import torch
from torch import Tensor

from minillm.kernels.linear.low_bit.layouts import FP8, Layout, LowBit, random_matrix
from minillm.model.config import ModelConfig
from minillm.model.loader import parameter_shapes
from minillm.storage import QUANTIZATIONS

_LAYOUTS = {
    "4": Layout(4, "plain", zero=8),
    "8": Layout(8, "plain"),
    "4k": Layout(4, "super"),
    "5k": Layout(5, "super"),
    "6k": Layout(6, "bytes", zero=32, group=16),
    "fp8": FP8,
}


class RandomTensors:
    """A `minillm.model.loader.TensorSource` of random weights, in 16 bits or quantized.

    The weights have about the size of a trained model's. Activations therefore stay finite in half precision through
    any number of layers. Values are bfloat16 numbers, as in most published checkpoints: `minillm.kernels.cpu` reads
    them faster than other numbers. Each rank slices its part from the whole tensor, so any number of ranks compute the
    same model.

    Args:
        form: a quantization from `minillm.storage.QUANTIZATIONS`; None: 16-bit weights.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0, form: str | None = None) -> None:
        self._shapes = dict(parameter_shapes(config))
        self._device, self._layers, self._form = device, config.num_layers, form
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        values = torch.randn(shape, generator=self._generator, device=self._device)[rows or slice(None)]
        return ((values if columns is None else values[:, columns]) * 0.02).bfloat16()

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        if self._form is None or rows is not None or columns is not None:
            return None
        out, width = self._shapes[name]
        layout = _LAYOUTS[QUANTIZATIONS[self._form][self._is_finer(name)]]
        if layout == FP8 and not name.endswith("_proj.weight"):
            return None
        if width % layout.block:
            layout = _LAYOUTS["8"]
        return random_matrix(layout, (out, width), 0.02, self._generator)

    def _is_finer(self, name: str) -> bool:
        """Return whether llama.cpp's mixed quantizations, such as Q4_K_M, give this matrix more bits than other
        matrices.

        They do so for the head, and for v and down in half of the layers.
        """
        if name == "lm_head.weight":
            return True
        layer, count = int(name.split(".")[2]) if ".layers." in name else 0, self._layers
        more = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
        return more and ("v_proj" in name or "down_proj" in name)
