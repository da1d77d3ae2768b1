"""The KV cache pool of a model."""

import torch

from minillm.kernels import KVCache
from minillm.model.llama import Llama


def new_kv_cache(model: Llama, num_blocks: int, block_size: int) -> KVCache:
    """Return an uninitialized KV cache pool of ``num_blocks`` blocks of ``block_size`` tokens.

    On a CPU, the operating system allocates memory on first use, so unused blocks of a large pool take none.
    """
    c, device = model.local, model.device
    shape = (c.num_layers, 2, num_blocks, block_size, c.num_kv_heads, c.head_dim)
    # Huge pages are off. With them, the first token of each block would clear 2 MB per layer.
    if not model.kv_in_8_bits:
        return KVCache(torch.empty(shape, dtype=model.dtype, device=device))
    scales = torch.empty(*shape[:3], c.num_kv_heads, block_size, dtype=torch.float32, device=device)
    return KVCache(torch.empty(shape, dtype=torch.int8, device=device), scales)
