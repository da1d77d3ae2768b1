"""Rotary tables: which angle belongs to which position.

Names and arithmetic follow Hugging Face transformers, so that long contexts agree with it to the bit in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.rope_config import RopeConfig
from minillm.model.rope_scaling import longrope, yarn

_MAX_POSITIONS = 1 << 23  # of a table: with 128 dimensions it takes 4 GiB


def inverse_frequencies(config: ModelConfig, length: int | None = None) -> tuple[Tensor, float]:
    """The angular step of each pair of dimensions, ``[head_dim / 2]`` float32, and the factor on cos and sin.

    Args:
        length: the sequence's length in tokens, for the types whose frequencies depend on it (``dynamic``,
            ``longrope``).

    Raises:
        WeightsError: the model's numbers give none.
    """
    rope, dim = config.rope, config.head_dim
    try:
        inverse, factor = _scaled(rope, dim, config.max_position_embeddings, length)
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
    return inverse, factor


def _scaled(rope: RopeConfig, dim: int, context: int, length: int | None) -> tuple[Tensor, float]:
    if rope.type == "yarn":
        return yarn(rope, dim)
    if rope.type == "longrope":
        return longrope(rope, dim, length)
    if rope.type == "dynamic":
        return _dynamic(rope, dim, context, length), 1.0
    inverse = _plain(rope.theta, dim)
    if rope.type == "linear":
        inverse = inverse / rope.factor
    elif rope.type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.type == "proportional":
        # A share of the dimensions turns, the slow rest stands still.
        turning = int(rope.options["partial_rotary_factor"] * dim // 2)
        inverse = inverse.where(torch.arange(dim // 2) < turning, 0.0) / rope.factor
    return inverse, 1.0


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dynamic(rope: RopeConfig, dim: int, context: int, length: int | None) -> Tensor:
    """NTK-aware scaling by the current length (u/emozilla 2023): theta grows once the trained context is exceeded."""
    length = max(length or 0, context)
    stretch = rope.factor * length / context - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by ``factor``, high ones kept, those between interpolated."""
    low, high = rope.options["low_freq_factor"], rope.options["high_freq_factor"]
    original = rope.original_max_position_embeddings
    assert original is not None  # read_rope sets it
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / rope.factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, between, scaled)


class RotaryTable:
    """Cosines and sines per position, ``[max_positions, head_dim / 2]`` float32 each.

    The angles of ``dynamic`` and ``longrope`` scaling have no such table where sequences may be longer than
    `ModelConfig.rope_changes_beyond`: they depend on a length as well as on a position, and `rows` computes them. A
    prompt token counts the whole prompt as its length, a generated token its own position, as transformers does; so
    the angle of a token never depends on how the prompt was cut into chunks. What was computed before a sequence grew
    beyond that length keeps its angles, as in the cache of transformers. Under ``longrope`` that is a break: a model
    that is asked within its original context only is better (and faster) off with ``max_model_len`` at most that.

    Raises:
        WeightsError: the model's numbers give no angles, or there are too many positions.
    """

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        if max_positions > _MAX_POSITIONS:
            raise WeightsError(
                f"a context of {max_positions:,} tokens is more than {_MAX_POSITIONS:,}; say a lower --max-model-len"
            )
        self.config = config
        self.device = device
        limit = config.rope_changes_beyond
        self.dynamic = limit is not None and max_positions > limit
        inverse, self.factor = inverse_frequencies(config)
        if self.dynamic:
            inverse_frequencies(config, max_positions)  # raises here and not in the middle of an answer
        angles = torch.outer(torch.arange(max_positions).float(), inverse)
        self.cos = angles.cos().mul_(self.factor).to(device)
        self.sin = angles.sin_().mul_(self.factor).to(device)

    def rows(self, positions: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``[num_tokens, head_dim / 2]``, for ``positions [num_tokens]`` int64.

        Args:
            lengths: per token, the sequence length that its angles go by; needed where ``dynamic`` only.
        """
        if not self.dynamic:
            return self.cos[positions], self.sin[positions]
        assert lengths is not None
        inverse = {length: inverse_frequencies(self.config, length)[0] for length in set(lengths)}
        steps = torch.stack([inverse[length] for length in lengths]).to(self.device)
        angles = positions[:, None].float() * steps
        return angles.cos() * self.factor, angles.sin() * self.factor
