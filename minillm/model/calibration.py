"""Finish a model after its weights are loaded.

On a CPU, pack weights by means of an example input. On a GPU, choose scales for the results of low-bit kernels.
"""

import torch

from minillm.model.kv_cache import new_kv_cache
from minillm.model.llama import Batch, Llama

_NUM_TOKENS = 64
_BLOCK = 16


def calibrate_int8(model: Llama, max_positions: int) -> None:
    """Compute 64 fixed random tokens. This packs each 8-bit matrix at its first matmul: see `kernels.cpu.packed_int8`.

    Each matrix uses more bits for the columns in which its input is large. Random tokens show these columns nearly as
    well as text does: the KL divergence from exact weights is 1.5e-3. It is 1.4e-3 if the measured text itself chooses
    the columns, and 5.1e-3 if no column gets more bits.
    """
    count = min(_NUM_TOKENS, max_positions)
    generator = torch.Generator().manual_seed(0)
    places, blocks = torch.arange(count), -(-count // _BLOCK)
    batch = Batch(
        token_ids=torch.randint(model.config.vocab_size, (count,), generator=generator),
        positions=places,
        slot_mapping=places,
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        context_lens=torch.tensor([count], dtype=torch.int32),
        num_decodes=0,
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        rope_lengths=[count] * count if model.rotary.dynamic else None,
    )
    with torch.inference_mode():
        model.forward(batch, new_kv_cache(model, blocks, _BLOCK))


def bound_results(model: Llama) -> None:
    """Choose fixed scales for float16 results that are the input of another low-bit kernel on a GPU.

    See `LinearWeight.bound_gated` and `LinearWeight.bound_attended`.
    """
    for layer in model.layers:  # a layer's other norms precede no fused pair of matmuls
        if layer.post_attention_norm is not None:
            layer.gate_up.bound_gated(layer.post_attention_norm)
        if layer.input_norm is not None:
            layer.o.bound_attended(layer.qkv, layer.input_norm)
