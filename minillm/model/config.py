"""What a checkpoint says of its architecture, checked once.

`ModelConfig.from_hf` reads a Hugging Face ``config.json`` as plain data. Keys that change the arithmetic are either
supported or refused by name; a required key has no default, because a wrong default talks well for a hundred tokens
and nonsense after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import WeightsError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how it is stretched beyond the trained context.

    ``options`` holds the remaining keys of the scaling type, under Hugging Face's names (``low_freq_factor``,
    ``beta_fast``, ``attention_factor``, …). ``frequency_factors`` divides each frequency, as GGUF files store llama3
    scaling: one value per pair of dimensions.
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. All sizes in elements; ``max_position_embeddings`` in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # what the checkpoint was saved in, where it says so

    @property
    def num_parameters(self) -> int:
        """Weights and biases, tied embeddings counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one token slot takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a ``config.json`` (old and new key layouts).

        Raises:
            WeightsError: a required key is missing or of the wrong type, or names something unsupported.
        """
        architecture = _architecture(config)
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        kv_heads = heads if config.get("num_key_value_heads") is None else _integer(config, "num_key_value_heads")
        if config.get("head_dim") is not None:
            head_dim = _integer(config, "head_dim")
        elif hidden % heads:
            raise WeightsError(
                f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; no head_dim is given"
            )
        else:
            head_dim = hidden // heads
        if heads % kv_heads:
            raise WeightsError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise WeightsError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
        max_positions = _integer(config, "max_position_embeddings")
        _refuse_unsupported(config, max_positions)
        eos = _token_ids(config.get("eos_token_id")) + _token_ids((generation_config or {}).get("eos_token_id"))
        bos = _token_ids(config.get("bos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_integer(config, "intermediate_size"),
            rms_norm_eps=_number(config, "rms_norm_eps"),
            max_position_embeddings=max_positions,
            rope=_rope(config, max_positions, head_dim),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            dtype=config.get("dtype") or config.get("torch_dtype"),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names:
        by_type = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
        names = [by_type.get(config.get("model_type", ""), config.get("model_type") or "(none named)")]
    if names[0] not in ARCHITECTURES:
        raise WeightsError(
            f"config.json: architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return str(names[0])


def _refuse_unsupported(config: Mapping[str, Any], max_positions: int) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise WeightsError(f"config.json: hidden_act {activation!r} is not supported; supported: 'silu'")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise WeightsError(
            f"config.json: quantised weights ({method}) are not supported; use the unquantised model or a .gguf file"
        )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True) and window < max_positions:
        raise WeightsError(
            f"config.json: sliding_window {window} is not supported (context {max_positions}); "
            f"set sliding_window to null and max_position_embeddings to {window} to use the model within its window"
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise WeightsError("config.json: partial_rotary_factor other than 1 is not supported")


def _rope(config: Mapping[str, Any], max_positions: int, head_dim: int) -> RopeConfig:
    """Both layouts: ``rope_parameters`` (new) and ``rope_theta`` + ``rope_scaling`` (old)."""
    if config.get("rope_parameters") is not None:
        values = dict(config["rope_parameters"])
        if "rope_theta" not in values and "rope_theta" not in config:
            raise WeightsError("config.json: rope_parameters has no rope_theta")
        theta = values.pop("rope_theta", config.get("rope_theta"))
        if config.get("rope_scaling") is not None:
            raise WeightsError("config.json: both rope_parameters and rope_scaling are given; remove one")
    else:
        values = dict(config.get("rope_scaling") or {})
        # Llama 1 and 2 were saved before the key existed; their theta is 10,000.
        theta = config.get("rope_theta", 10_000.0)
    rope_type = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    if rope_type not in ROPE_TYPES:
        raise WeightsError(f"config.json: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    factors = values.pop("frequency_factors", None)
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise WeightsError("config.json: partial_rotary_factor other than 1 is not supported")
    if factors is not None and len(factors) != head_dim // 2:
        raise WeightsError(
            f"rope frequency factors: {len(factors)} values for head_dim {head_dim}; needs {head_dim // 2}"
        )
    factor = values.pop("factor", None)
    if rope_type != "default" and factor is None:
        raise WeightsError(f"config.json: rope type {rope_type!r} needs a factor")
    if rope_type == "llama3":
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if values.get(key) is None:
                raise WeightsError(f"config.json: rope type 'llama3' needs {key}")
    original = values.pop("original_max_position_embeddings", None)
    if original is None:
        original = config.get("original_max_position_embeddings")
    options = {key: value for key, value in values.items() if value is not None}
    for key, value in [
        ("rope_theta", theta),
        ("factor", 1.0 if factor is None else factor),
        *options.items(),
    ]:
        if isinstance(value, bool) and key == "truncate":
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise WeightsError(f"config.json: rope {key} must be a number, not {value!r}")
    return RopeConfig(
        theta=float(theta),
        type=rope_type,
        factor=1.0 if factor is None else float(factor),
        original_max_position_embeddings=None if original is None else int(original),
        options=options,
        frequency_factors=None if factors is None else tuple(float(value) for value in factors),
    )


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if value is None:
        raise WeightsError(f"config.json: required key {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise WeightsError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = _number(config, key)
    if value != int(value):
        raise WeightsError(f"config.json: {key} must be a whole number, not {value!r}")
    return int(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise WeightsError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def _token_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [int(item) for item in values if item is not None]
