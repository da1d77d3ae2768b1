"""Matrices of a checkpoint rounded to fewer bits while they are loaded: ``--quantize``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kernels import LowBit
from minillm.kernels.low_bit import GROUP
from minillm.kernels.low_bit_rounding import rounded
from minillm.model.loader import TensorSource

BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class RoundedTensors:
    """A source whose matrices have few bits, the embedding excepted; what is stored in few bits stays as it is.

    Each is rounded as it is read, on the device that it is for, and by the part that a rank reads.
    """

    source: TensorSource
    bits: int

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return self.source.tensor(name, rows, columns)

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """The part as it is stored, or rounded; None of an embedding, or where groups of 32 do not fill a row."""
        stored = self.source.low_bit(name, device, rows, columns)
        if stored is not None or not name.endswith(("_proj.weight", "lm_head.weight")):
            return stored
        numbers = self.source.tensor(name, rows, columns)
        return None if numbers.shape[1] % GROUP else rounded(numbers.to(device), self.bits)
