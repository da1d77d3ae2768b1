"""Convert a checkpoint's tensors to the names and the order of rows that `minillm.model.loader` expects.

- Names are translated (`Architecture.names`). Tensors of a vision encoder are left out.
- If the checkpoint stacks several matrices in one tensor (`Architecture.packed`), each is read as a slice of its rows.
- Rows of q and k are reordered so that a rotary pair's two dimensions are half a head apart, as in Llama. Any order
  that q and k share gives the same attention. Dimensions that do not rotate get the angle 0.
- Constants of the architecture are multiplied into norm weights, or added to them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.kernels import LowBit
from minillm.model.architectures import ARCHITECTURES, text_name
from minillm.model.config import ModelConfig
from minillm.model.loader import TensorSource, parameter_shapes
from minillm.text.safe import clean_line


@dataclass(frozen=True)
class LlamaTensors:
    """A `TensorSource` with the converted tensors of the checkpoint ``stored``, which is in Hugging Face's layout."""

    stored: TensorSource
    config: ModelConfig

    @cached_property
    def _places(self) -> dict[str, tuple[str, slice | None]]:
        """A dictionary: tensor's name -> (name of the stored tensor that contains it, its rows there; None: all)."""
        architecture = ARCHITECTURES[self.config.architecture]
        rows = {name: shape[0] for name, shape in parameter_shapes(self.config)} if architecture.packed else {}
        places: dict[str, tuple[str, slice | None]] = {}
        for name in self.stored.names():
            if (in_text := text_name(name)) is None:
                continue
            *parents, kind = in_text.split(".")
            own = ".".join(architecture.names.get(each, each) for each in parents)
            packed = next((each for each in architecture.packed if own.endswith(each)), "")
            found: dict[str, slice | None] = {}
            start = 0
            for part in architecture.packed.get(packed, ()):
                whole = f"{own.removesuffix(packed)}{part}.{kind}"
                found[whole] = slice(start, start := start + rows.get(whole, 0))
            for whole, where in (found or {".".join((*filter(None, [own]), kind)): None}).items():
                if whole in places:
                    raise WeightsError(f"tensors {clean_line(places[whole][0])} and {clean_line(name)} are the same")
                places[whole] = name, where
        return places

    @cached_property
    def _head_order(self) -> Tensor | None:
        """The position of each head dimension in the checkpoint, ``[head_dim]`` int64; None if the order is kept."""
        rope, dim = self.config.rope, self.config.head_dim
        turning = rope.dims or dim
        if turning == dim and not rope.has_adjacent_pairs:
            return None
        pairs = torch.arange(turning).view(-1, 2).T if rope.has_adjacent_pairs else torch.arange(turning).view(2, -1)
        return torch.cat((pairs, torch.arange(turning, dim).view(2, -1)), 1).flatten()

    def stored_name(self, name: str) -> str:
        """Return the name of the stored tensor that contains the tensor ``name``."""
        return self._places[name][0]

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, rows = self._places[name]
        shape = self.stored.shape(stored)
        if rows is None:
            return shape
        # If the parts' rows do not add up to the stored matrix, return its shape, which the loader rejects.
        last = max(part.stop for where, part in self._places.values() if where == stored and part is not None)
        return (rows.stop - rows.start, *shape[1:]) if shape[0] == last else shape

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        order = self._order(name, rows)
        values = self.stored.tensor(self._places[name][0], self._rows(name, rows), columns)
        values = values if order is None else values[order]
        if "norm" in name.split(".")[-2] and self.config.norm_offset:
            values = values.float() + self.config.norm_offset
        if name == "model.norm.weight" and self.config.logits_scale != 1:
            values = values.float() * self.config.logits_scale
        return values

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        order = self._order(name, rows)
        matrix = self.stored.low_bit(self._places[name][0], device, self._rows(name, rows), columns)
        return matrix if matrix is None or order is None else matrix.rows(order.to(device))

    def _rows(self, name: str, rows: slice | None) -> slice | None:
        """Convert a range of a tensor's rows to a range of rows of the stored tensor, which may stack several tensors.

        None means all rows.
        """
        own = self._places[name][1]
        if own is None or rows is None:
            return rows if own is None else own
        return slice(own.start + rows.start, min(own.stop, own.start + rows.stop))

    def _order(self, name: str, rows: slice | None) -> Tensor | None:
        """Return the order in which to take stored rows of q, k or their norms, or None to keep their order.

        ``rows`` must be whole heads. Indices count from the first of these rows.
        """
        order, dim = self._head_order, self.config.head_dim
        if order is None or not name.split(".")[-2].startswith(("q_", "k_")):
            return None
        count = self.shape(name)[0] if rows is None else rows.stop - rows.start
        return (torch.arange(0, count, dim)[:, None] + order).flatten()
