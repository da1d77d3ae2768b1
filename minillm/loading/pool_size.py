"""Measure memory, and compute how many blocks of K and V fit."""

import sys

import torch

from minillm import system
from minillm.config import EngineConfig
from minillm.errors import CapacityError
from minillm.fit.budget import CPU_POOL_SHARE, CPU_POOL_TOKENS, Budget
from minillm.model.config import ModelConfig
from minillm.model.kinds import one_layer_of_each_kind
from minillm.model.kv_cache import new_kv_cache
from minillm.model.llama import Batch, Llama
from minillm.parallel.collectives import Ranks
from minillm.progress import size


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the GPU, or of this process's machine or container, in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else system.memory()[0]


def device_memory(device: torch.device) -> tuple[int, int, int]:
    """Return three sizes in bytes: a device's free memory, its total memory, and the memory that this process holds.

    On a GPU, the last figure is torch's memory, without the memory of the CUDA context.
    """
    if device.type == "cuda":
        return *torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    return *system.memory(), system.resident_bytes()


def budget_of(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Budget:
    """Return a device's memory budget: its total memory, the memory that is free now, and the options in ``config``."""
    on_gpu = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if on_gpu else system.memory()[1]
    return Budget(free_bytes(device), total, on_gpu, dtype.itemsize, config)


@torch.inference_mode()
def activation_bytes(model: Llama, num_tokens: int, num_logits: int, longest: int) -> int:
    """Run a step of ``num_tokens`` tokens on a GPU. Return its peak memory in bytes, without weights and pool.

    Args:
        num_logits: the number of tokens that need logits.
        longest: the length of the longest sequence in tokens. With an 8-bit cache, the step dequantizes this many
            tokens.
    """
    device = model.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    batch = Batch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros - 1,
        block_tables=torch.zeros(1, -(-max(num_tokens, longest) // 16), dtype=torch.int32, device=device),
        context_lens=starts[1:],
        num_decodes=0,
        cu_seqlens=starts,
        logit_rows=zeros[:num_logits],
        rope_lengths=[1] * num_tokens if model.rotary.dynamic else None,
    )
    with one_layer_of_each_kind():
        logits = model.forward(batch, new_kv_cache(model, 1, 16).zero_())
    wide = logits.float()  # penalties and log-probabilities need copies
    wide.log_softmax(-1).clone()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del logits, wide, batch
    torch.cuda.empty_cache()
    return peak


def size_pool(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    element_size: int,
    reserved: int = 0,
    ranks: Ranks | None = None,
    draft_bytes_per_token: int = 0,
) -> tuple[int, int]:
    """Compute the size of the KV cache pool, after the weights are loaded. It depends on ``config`` and free memory.

    Args:
        model: the configuration of the model, or of this rank's part of it.
        element_size: bytes of a number in the pool.
        reserved: bytes that steps need, without weights and pool.
        ranks: the processes among which the model is sharded. The one with the least memory determines the result.
        draft_bytes_per_token: bytes per token in a draft model's pool, which gets the same number of blocks; 0 without
            one.

    Returns:
        The number of blocks, and the maximum length of a sequence in tokens.

    Raises:
        CapacityError: not one block fits, or the requested pool does not.
    """
    longest = config.max_model_len or model.max_position_embeddings
    per_token = model.kv_bytes_per_token(element_size) + draft_bytes_per_token
    block_bytes = per_token * config.block_size
    if device.type == "cpu":
        pool_bytes, most = int(free_bytes(device) * CPU_POOL_SHARE) - reserved, CPU_POOL_TOKENS
    else:
        free, total = torch.cuda.mem_get_info(device)
        pool_bytes, most = int(free - total * (1 - config.gpu_memory_utilization)) - reserved, sys.maxsize
    most = -(-max(config.pool_tokens or most, config.max_model_len or 0) // config.block_size)
    pool_bytes, num_blocks = max(0, pool_bytes), config.num_blocks
    if num_blocks is None:
        num_blocks = min(pool_bytes // block_bytes, most)
        if ranks is not None:
            num_blocks = ranks.least(num_blocks)
    if num_blocks < 1 or num_blocks * block_bytes > max(pool_bytes, free_bytes(device)):
        asked = "one block" if config.num_blocks is None else f"num_blocks={num_blocks}"
        kept = f", {size(reserved)} are reserved for the steps" if reserved else ""
        raise CapacityError(
            f"the KV cache does not fit: {asked} takes {size(max(num_blocks, 1) * block_bytes)} ({config.block_size} "
            f"tokens of {size(per_token)}), {size(pool_bytes)} may be used{kept}; "
            "use a smaller model, a shorter dtype, fewer blocks, or a lower max_num_batched_tokens"
        )
    pool_tokens = num_blocks * config.block_size
    if longest > pool_tokens:
        if config.max_model_len is not None:
            raise CapacityError(
                f"max_model_len {longest} needs {-(-longest // config.block_size)} blocks of {config.block_size} "
                f"tokens, but the pool has {num_blocks}; lower max_model_len or raise num_blocks"
            )
        longest = pool_tokens
    return num_blocks, longest
