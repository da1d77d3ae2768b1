"""Rotary tables (Su et al. 2021): cosine and sine of the angles of each position.

Names and arithmetic follow Hugging Face transformers, so that long contexts agree with it bitwise in float32.
"""

import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.model.rope_scaling import inverse_frequencies

_MAX_POSITIONS = 1 << 23  # maximum positions of a table, which then takes 4 GiB with 128 dimensions


class RotaryTable:
    """Cosines and sines per position, ``[max_positions, head_dim / 2]`` float32 each.

    With ``dynamic`` and ``longrope`` scaling, sequences may exceed `ModelConfig.rope_changes_beyond` tokens. Angles
    then depend on a length as well, so `rows` computes them without the table. As in transformers, the length for a
    prompt token is the length of the whole prompt. The length for a generated token is its own position. Chunk
    boundaries therefore never change an angle.

    When a sequence grows beyond the limit, K of its earlier tokens keeps the angles from before. With ``longrope`` this
    is a discontinuity. To avoid it, set ``max_model_len`` to the original context, which is also faster.

    Raises WeightsError if the config's numbers give no finite angles, or if there are too many positions.
    """

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        if max_positions > _MAX_POSITIONS:
            raise WeightsError(
                f"a context of {max_positions:,} tokens is more than {_MAX_POSITIONS:,}; set a lower --max-model-len"
            )
        self.config, self.device = config, device
        limit = config.rope_changes_beyond
        self.dynamic = limit is not None and max_positions > limit
        inverse, factor = inverse_frequencies(config)
        self.factor = factor.to(device)
        if self.dynamic:
            inverse_frequencies(config, max_positions)  # raise errors now instead of in the middle of an answer
        angles = torch.outer(torch.arange(max_positions).float(), inverse)
        self.cos = angles.cos().mul_(factor).to(device)
        self.sin = angles.sin_().mul_(factor).to(device)

    def rows(self, positions: Tensor, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)``, each ``[num_tokens, head_dim / 2]``, for ``positions [num_tokens]`` int64.

        ``lengths`` is needed only if `dynamic` is true: for each token, the length in tokens that its angles depend on.
        """
        if not self.dynamic:
            return self.cos[positions], self.sin[positions]
        assert lengths is not None
        inverse = {length: inverse_frequencies(self.config, length)[0] for length in set(lengths)}
        steps = torch.stack([inverse[length] for length in lengths]).to(self.device)
        angles = positions[:, None].float() * steps
        return angles.cos() * self.factor, angles.sin() * self.factor
