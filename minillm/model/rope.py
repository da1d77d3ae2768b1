"""Rotary tables (Su et al. 2021): which angle belongs to which position."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.rope_scaling import inverse_frequencies

_MAX_POSITIONS = 1 << 23  # of a table: with 128 dimensions it takes 4 GiB


class RotaryTable:
    """Cosines and sines per position, ``[max_positions, head_dim / 2]`` float32 each.

    The angles of ``dynamic`` and ``longrope`` scaling have no such table where sequences may be longer than
    `ModelConfig.rope_changes_beyond`: they depend on a length, too, and `rows` computes them. A prompt token counts the
    whole prompt as its length, a generated token its own position, as in transformers; so no angle depends on the cuts
    between chunks. K that was computed before a sequence grew beyond that length keeps its angles. Under ``longrope``
    that is a break: within its original context a model is better and faster off with ``max_model_len`` at most that.

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
