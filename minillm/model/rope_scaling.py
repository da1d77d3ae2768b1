"""Scalings of the rotary embedding for long contexts, by the names and with the arithmetic of transformers."""

import math

import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.rope_config import RopeConfig


def inverse_frequencies(config: ModelConfig, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the inverse frequencies and the factors on cos and sin, each ``[head_dim / 2]`` float32.

    An inverse frequency is the angle by which a pair of dimensions rotates per position. Pairs that do not rotate have
    the inverse frequency 0 and the factor 1. With the scaling types ``dynamic`` and ``longrope``, inverse frequencies
    also depend on the sequence's ``length`` in tokens.

    Raises WeightsError if the config's numbers give no finite angles.
    """
    rope = config.rope
    try:
        inverse, factor = _scaled(rope, rope.dims or config.head_dim, config.max_position_embeddings, length)
    except (ArithmeticError, ValueError):
        inverse, factor = torch.tensor(math.nan), math.nan
    if rope.frequency_factors is not None:
        inverse = inverse / torch.tensor(rope.frequency_factors)
    factor *= rope.amplitude
    farthest = inverse * max(length or 0, config.max_position_embeddings)
    if not (farthest.isfinite().all() and math.isfinite(factor)):
        raise WeightsError(
            f"config.json: rope type {rope.type!r} with rope_theta {rope.theta:g} and factor {rope.factor:g} "
            "gives no finite angles; one of its numbers is wrong"
        )
    still = config.head_dim // 2 - len(inverse)
    return torch.cat((inverse, torch.zeros(still))), torch.cat((torch.full_like(inverse, factor), torch.ones(still)))


def _scaled(rope: RopeConfig, dim: int, context: int, length: int | None) -> tuple[Tensor, float]:
    if rope.type == "yarn":
        return _yarn(rope, dim)
    if rope.type == "longrope":
        return _longrope(rope, dim, length)
    if rope.type == "dynamic":
        return _dynamic(rope, dim, context, length), 1.0
    inverse = _plain(rope.theta, dim)
    if rope.type == "linear":
        inverse = inverse / rope.factor
    elif rope.type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.type == "proportional":
        # Only the first dimensions rotate; the others keep angle 0.
        turning = int(rope.options["partial_rotary_factor"] * dim // 2)
        inverse = inverse.where(torch.arange(dim // 2) < turning, 0.0) / rope.factor
    return inverse, 1.0


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dynamic(rope: RopeConfig, dim: int, context: int, length: int | None) -> Tensor:
    """Scale by the current length, NTK-aware (u/emozilla 2023). Beyond the trained context, theta grows with it."""
    length = max(length or 0, context)
    stretch = rope.factor * length / context - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Scale as in Llama 3.1: divide low frequencies by ``factor``, keep high frequencies, interpolate in between."""
    low, high = rope.options["low_freq_factor"], rope.options["high_freq_factor"]
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / rope.factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, between, scaled)


def _yarn(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Scale as in YaRN (Peng et al. 2023): interpolate slow dimensions, extrapolate fast dimensions, sharpen the
    softmax.
    """
    options, original = rope.options, rope.original_max_position_embeddings

    def sharpness(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        both, every = options.get("mscale"), options.get("mscale_all_dim")
        attention_factor = sharpness(both) / sharpness(every) if both and every else sharpness()

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(options.get("beta_fast") or 32), dimension_of(options.get("beta_slow") or 1)
    if options["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    steps = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    return (1.0 / (rope.factor * steps)) * ramp + (1.0 / steps) * (1 - ramp), attention_factor


def _longrope(rope: RopeConfig, dim: int, length: int | None) -> tuple[Tensor, float]:
    """Scale as in LongRoPE (Ding et al. 2024): divide each frequency by its own divisor.

    Sequences longer than the original context use a second list of divisors.
    """
    original = rope.original_max_position_embeddings
    attention_factor = rope.options.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    divisors = torch.tensor(rope.long_factor if (length or 0) > original else rope.short_factor)
    return 1.0 / (divisors * rope.theta ** (torch.arange(0, dim, 2).float() / dim)), attention_factor
