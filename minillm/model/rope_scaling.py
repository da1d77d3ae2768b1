"""The two long ways of stretching rotary embeddings: YaRN and LongRoPE, as Hugging Face transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.model.rope_config import RopeConfig


def yarn(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, extrapolate fast ones, sharpen the softmax.

    Returns:
        The angular step of each pair of dimensions, ``[dim / 2]`` float32, and the factor on cos and sin.
    """
    options, original = rope.options, rope.original_max_position_embeddings
    assert original is not None  # read_rope sets it

    def sharpness(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        both, every = options.get("mscale"), options.get("mscale_all_dim")
        attention_factor = sharpness(both) / sharpness(every) if both and every else sharpness()

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(options.get("beta_fast") or 32), dimension_of(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    steps = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    return (1.0 / (rope.factor * steps)) * ramp + (1.0 / steps) * (1 - ramp), attention_factor


def longrope(rope: RopeConfig, dim: int, length: int | None) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): every frequency has a divisor of its own, found by a search.

    There are two sets of them. A sequence within the original context takes the short ones, a longer one the long ones.

    Args:
        length: the sequence's length in tokens; None is a short one.
    """
    original = rope.original_max_position_embeddings
    assert original is not None  # read_rope sets it
    attention_factor = rope.options.get("attention_factor")
    if attention_factor is None:
        stretched = rope.factor > 1
        attention_factor = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if stretched else 1.0
    divisors = torch.tensor(rope.long_factor if (length or 0) > original else rope.short_factor)
    return 1.0 / (divisors * rope.theta ** (torch.arange(0, dim, 2).float() / dim)), attention_factor
