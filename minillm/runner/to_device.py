"""The host's numbers on the device, without waiting for it."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor


def to_device(values: SequenceOf[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values [n]`` in ``dtype`` on the device, there before whatever is launched next.

    From memory that may be moved a copy waits until the device has done all that it has been given.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
