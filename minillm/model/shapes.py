"""Dimensions of models for speed tests with random weights, by the names that `minillm bench --shape` takes."""

from typing import Any

from minillm.model.config import ModelConfig
from minillm.model.rope_config import RopeConfig

_COMMON: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope": RopeConfig(theta=500_000.0),
    "eos_token_ids": (2,),
}
_SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")


def _shape(*sizes: int, tied: bool) -> ModelConfig:
    own: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    return ModelConfig(**_COMMON, **own, tie_word_embeddings=tied)


SHAPES = {
    "smollm2-135m": _shape(576, 30, 9, 3, 64, 1536, 49152, tied=True),
    "llama-1b": _shape(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    "llama-8b": _shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
    "granite-8b": ModelConfig.from_hf(
        {
            "architectures": ["GraniteForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12800, "vocab_size": 49159,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 0,
            "attention_multiplier": 2**-7, "embedding_multiplier": 12, "residual_multiplier": 0.22,
            "logits_scaling": 16,
        }
    ),
    "gemma-3-4b": ModelConfig.from_hf(
        {
            "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 34,
            "intermediate_size": 10240, "sliding_window": 1024, "max_position_embeddings": 8192,
        }
    ),
    "llama-70b": _shape(8192, 80, 64, 8, 128, 28672, 128256, tied=False),
}  # fmt: skip
