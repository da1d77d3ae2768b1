"""The host's numbers on the device, without waiting for it."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor


def to_device(values: SequenceOf[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values``, numbers or lists of them, in ``dtype`` on the device, there before whatever is launched next.

    From memory that may be moved a copy waits until the device has done all that it has been given.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
