"""Model shapes for speed tests with random weights, by their names in `minillm bench --shape`."""

from minillm.model.config import ModelConfig
from minillm.model.rope_config import RopeConfig


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=500_000.0),
        tie_word_embeddings=tied,
        eos_token_ids=(2,),
    )


SHAPES = {
    "smollm2-135m": _shape(576, 30, 9, 3, 64, 1536, 49152, True),
    "llama-1b": _shape(2048, 16, 32, 8, 64, 8192, 128256, True),
    "llama-8b": _shape(4096, 32, 32, 8, 128, 14336, 128256, False),
    "llama-70b": _shape(8192, 80, 64, 8, 128, 28672, 128256, False),
}
