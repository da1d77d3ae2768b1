"""Choose the device and the dtype."""

import torch

from minillm.config import EngineConfig
from minillm.errors import UsageError


def choose_device(config: EngineConfig, local_rank: int = 0) -> torch.device:
    """Return the device that ``config`` selects. If ``config`` names no GPU number, use ``local_rank``.

    Raises:
        UsageError: the requested GPU does not exist.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if config.device == "auto":
            return torch.device("cpu")
        built = torch.version.cuda
        reason = f"torch {torch.__version__} was built without CUDA" if built is None else "torch finds no CUDA GPU"
        raise UsageError(f"device {config.device}: {reason}; use --device cpu, or install a CUDA build of torch")
    device = torch.device("cuda" if config.device == "auto" else config.device)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"device {config.device}: this machine has {torch.cuda.device_count()} GPUs")
    if device.index is None and local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"rank {local_rank} needs GPU {local_rank}, but this machine has {torch.cuda.device_count()}; "
            "start fewer ranks (tensor_parallel_size, or torchrun's --nproc-per-node)"
        )
    return torch.device("cuda", local_rank if device.index is None else device.index)


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that ``config`` selects for ``device``."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
