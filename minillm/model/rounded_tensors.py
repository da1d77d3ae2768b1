"""Matrices of a checkpoint rounded to fewer bits while they are loaded: ``--quantize``."""

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
    """A source whose matrices have few bits; what is stored in few bits stays as it is.

    Not so the embedding, and in FP8 a head either: it would lose more there than all layers do. Each is rounded as it
    is read, on the device that it is for, and by the part that a rank reads.
    """

    source: TensorSource
    form: str  # of ``--quantize``

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return self.source.tensor(name, rows, columns)

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """The part as it is stored, or rounded; None of others, or where groups of 32 do not fill a row."""
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
