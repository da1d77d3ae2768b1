"""Quantize a checkpoint's matrices while they are loaded (the option ``--quantize``)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels import LowBit
from minillm.kernels.linear.low_bit.layouts import GROUP, in_fp8
from minillm.kernels.linear.low_bit.rounding import rounded
from minillm.model.loader import TensorSource

_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class RoundedTensors:
    """A `TensorSource` that quantizes the matrices of another source.

    Matrices that are already low-bit stay as they are. The embedding is not quantized, because this would cost more
    accuracy than quantizing all layers. For the same reason, FP8 leaves the output head unquantized. Each matrix is
    quantized when it is read, on its target device. With several ranks, only the part that this rank reads is
    quantized.
    """

    source: TensorSource
    form: str  # the value of ``--quantize``

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return self.source.tensor(name, rows, columns)

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """Return a slice of a matrix: as it is stored if the matrix is low-bit, else quantized.

        Return None if the tensor stays unquantized. With int8 and int4, a matrix also stays unquantized if the length
        of its rows is not a multiple of 32.
        """
        stored = self.source.low_bit(name, device, rows, columns)
        if stored is not None or not name.endswith(("_proj.weight", "lm_head.weight")):
            return stored
        bits = _BITS.get(self.form)
        if bits is None and name == "lm_head.weight":
            return None
        numbers = self.source.tensor(name, rows, columns)
        if bits is None:
            return in_fp8(numbers.to(device))
        return None if numbers.shape[1] % GROUP else rounded(numbers.to(device), bits)
