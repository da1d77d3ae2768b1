"""Copy numbers to the device without waiting for it."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: SequenceOf[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers, or nested lists of numbers, as a tensor on the device. Later launches see the copied values.

    The copy is from pinned memory. From pageable memory it would wait for all earlier work of the device.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
