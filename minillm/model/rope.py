"""Rotary tables and the ways of stretching them: which angle belongs to which position.

Names and arithmetic follow Hugging Face transformers, so that long contexts agree with it to the bit in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.model.config import ModelConfig, RopeConfig


def inverse_frequencies(config: ModelConfig, length: int | None = None) -> tuple[Tensor, float]:
    """The angular step of each pair of dimensions, ``[head_dim / 2]`` float32, and the factor on cos and sin.

    Args:
        length: for ``dynamic`` scaling only: the sequence's length in tokens, on which the frequencies depend.
    """
    rope, dim = config.rope, config.head_dim
    inverse, attention_factor = _plain(rope.theta, dim), 1.0
    if rope.type == "linear":
        inverse = inverse / rope.factor
    elif rope.type == "dynamic":
        inverse = _dynamic(rope, dim, config.max_position_embeddings, length)
    elif rope.type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.type == "yarn":
        inverse, attention_factor = _yarn(rope, dim, config.max_position_embeddings)
    if rope.frequency_factors is not None:
        inverse = inverse / torch.tensor(rope.frequency_factors)
    return inverse, attention_factor


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dynamic(rope: RopeConfig, dim: int, max_positions: int, length: int | None) -> Tensor:
    """NTK-aware scaling by the current length (u/emozilla 2023): theta grows once the trained context is exceeded."""
    length = max(length or 0, max_positions)
    stretch = rope.factor * length / max_positions - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by ``factor``, high ones kept, those between interpolated."""
    low, high = rope.options["low_freq_factor"], rope.options["high_freq_factor"]
    original = rope.original_max_position_embeddings
    assert original is not None  # ModelConfig refuses llama3 without it
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / rope.factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, between, scaled)


def _yarn(rope: RopeConfig, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, extrapolate fast ones, sharpen the softmax."""
    options = rope.options
    original = rope.original_max_position_embeddings or max_positions
    factor = rope.factor

    def sharpness(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        both, every = options.get("mscale"), options.get("mscale_all_dim")
        attention_factor = sharpness(factor, both) / sharpness(factor, every) if both and every else sharpness(factor)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(options.get("beta_fast") or 32), dimension_of(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    steps = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    return (1.0 / (factor * steps)) * ramp + (1.0 / steps) * (1 - ramp), float(attention_factor)


class RotaryTable:
    """Cosines and sines per position, ``[max_positions, head_dim / 2]`` float32 each.

    ``dynamic`` scaling has no such table, since its angles depend on a length as well as on a position: `rows` computes
    them. A prompt token counts the whole prompt as its length, a generated token its own position, as transformers
    does; so the angle of a token never depends on how the prompt was cut into chunks.
    """

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dynamic = config.rope.type == "dynamic" and max_positions > config.max_position_embeddings
        inverse, self.factor = inverse_frequencies(config)
        angles = torch.outer(torch.arange(max_positions).float(), inverse)
        self.cos = (angles.cos() * self.factor).to(device)
        self.sin = (angles.sin() * self.factor).to(device)

    def rows(self, positions: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``[num_tokens, head_dim / 2]``, for ``positions [num_tokens]`` int64.

        Args:
            lengths: per token, the sequence length that ``dynamic`` scaling goes by; needed by that type only.
        """
        if not self.dynamic:
            return self.cos[positions], self.sin[positions]
        assert lengths is not None
        inverse = {length: inverse_frequencies(self.config, length)[0] for length in set(lengths)}
        steps = torch.stack([inverse[length] for length in lengths]).to(self.device)
        angles = positions[:, None].float() * steps
        return angles.cos() * self.factor, angles.sin() * self.factor
