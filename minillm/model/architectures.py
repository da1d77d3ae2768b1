"""The supported architectures: how each one's config.json, tensors and GGUF files differ from Llama's.

An `Architecture` is data: defaults, names, flags. Its ``read`` function adds the `ModelConfig` fields that depend on
keys of config.json. ``docs/add-a-model.md`` follows the addition of one architecture.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.model import architecture_keys as keys
from minillm.text.reading import Values


@dataclass(frozen=True)
class Architecture:
    """Describe how the checkpoints of one architecture differ from Llama's.

    Attributes:
        name: the name in the ``architectures`` of config.json.
        model_type: the ``model_type`` of config.json.
        defaults: values for keys that are missing in config.json, where transformers' default differs from Llama's.
        fields: fields of `ModelConfig` with the same value for all models of the architecture.
        read: called with config.json and the number of layers. Returns further fields of `ModelConfig`.
        names: component of a tensor's name in the checkpoint -> component of its name in `parameter_shapes`.
        packed: name of a matrix that the checkpoint stacks from several, by rows -> names of those matrices.
        has_partial_rope: the config.json may have ``partial_rotary_factor``, the fraction of each head that rotates.
        has_adjacent_pairs: the two dimensions of a rotary pair are adjacent. In Llama they are half a head apart.
        has_two_ropes: layers with an attention window have a rotary embedding of their own.
        has_rope_alpha: with dynamic scaling, ``alpha`` is a fixed factor on the base of the frequencies.
        gguf: the value of ``general.architecture`` in GGUF files; empty if llama.cpp does not know the architecture.
        gguf_is_permuted: llama.cpp's converter permutes the rows of q and k, so that rotary pairs become adjacent.
        gguf_with_windows: the name of the architecture of GGUF files that have the same ``gguf`` and a window.
        gguf_names: name of a layer's tensor in GGUF files -> its name in the checkpoint, where Llama's differ.
        gguf_keys: further metadata key, without the architecture's prefix -> config.json key with the same value.
    """

    name: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Values, int], keys.Fields] = keys.biases
    names: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_partial_rope: bool = False
    has_adjacent_pairs: bool = False
    has_two_ropes: bool = False
    has_rope_alpha: bool = False
    gguf: str = ""
    gguf_is_permuted: bool = False
    gguf_with_windows: str = ""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_keys: Mapping[str, str] = field(default_factory=dict)


# Norms after attention and MLP: names in checkpoints that have no norms before attention and MLP -> names here.
_NORMS_AFTER = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_GGUF_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_WINDOW_KEY = {"attention.sliding_window": "sliding_window"}


_ALL = (
    Architecture(
        "LlamaForCausalLM", "llama", gguf="llama", gguf_is_permuted=True, gguf_with_windows="MistralForCausalLM"
    ),
    Architecture("MistralForCausalLM", "mistral", {"sliding_window": 4096}, read=keys.mistral),
    Architecture(
        "Qwen2ForCausalLM", "qwen2", {"sliding_window": 4096, "max_window_layers": 28}, read=keys.qwen2, gguf="qwen2"
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        {"qk_norm": "heads"},
        keys.qwen3,
        gguf="qwen3",
    ),
    Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        {"no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        read=keys.smollm3,
        gguf="smollm3",
        gguf_is_permuted=True,
    ),
    Architecture("InternLM3ForCausalLM", "internlm3", {"head_dim": 128}, read=keys.internlm3),
    Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        fields={"norms": "after", "qk_norm": "all"},
        read=keys.attention_biases,
        names=_NORMS_AFTER,
        gguf="olmo2",
        gguf_names=_GGUF_NORMS_AFTER,
        gguf_with_windows="Olmo3ForCausalLM",
    ),
    Architecture(
        "Olmo3ForCausalLM",
        "olmo3",
        {"sliding_window": 4096, "rope_theta": 500_000.0},
        {"norms": "after", "qk_norm": "all"},
        keys.olmo3,
        names=_NORMS_AFTER,
        has_two_ropes=True,
    ),
    Architecture(
        "Exaone4ForCausalLM",
        "exaone4",
        {"sliding_window": 4096},
        {"norms": "after", "qk_norm": "heads"},
        keys.exaone4,
        names=_NORMS_AFTER,
        gguf="exaone4",
        gguf_names=_GGUF_NORMS_AFTER,
        gguf_keys=_WINDOW_KEY,
    ),
    Architecture(
        "Glm4ForCausalLM",
        "glm4",
        {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
        {"norms": "both"},
        keys.glm4,
        packed=_GATE_UP,
        has_partial_rope=True,
        has_adjacent_pairs=True,
        gguf="glm4",
        gguf_names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        {"norms": "both", "qk_norm": "heads", "activation": "gelu", "norm_offset": 1.0},
        keys.gemma3,
        names={**_NORMS_AFTER, "pre_feedforward_layernorm": "post_attention_layernorm"},
        has_two_ropes=True,
        gguf="gemma3",
        gguf_names={**_GGUF_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        gguf_keys={**_WINDOW_KEY, "rope.freq_base_swa": "rope_local_base_freq"},
    ),
    Architecture(
        "GraniteForCausalLM",
        "granite",
        read=keys.granite,
        gguf="granite",
        gguf_is_permuted=True,
        gguf_keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        read=keys.granite_hybrid,
        names={"shared_mlp": "mlp", "output_linear": "down_proj"},
        packed={"mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    Architecture(
        "Phi3ForCausalLM",
        "phi3",
        {"original_max_position_embeddings": 4096},
        read=keys.phi3,
        packed={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            **_GATE_UP,
        },
        has_partial_rope=True,
        gguf="phi3",
        gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        gguf_keys=_WINDOW_KEY,
    ),
    Architecture(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        {"rope_theta": 500_000.0, "head_dim": 128, "tie_word_embeddings": True, "num_key_value_heads": 2},
        read=keys.ernie,
        has_adjacent_pairs=True,
        gguf="ernie4_5",
    ),
    Architecture(
        "HeliumForCausalLM",
        "helium",
        {"rope_theta": 100_000.0, "head_dim": 128, "num_key_value_heads": 20},
        read=keys.helium,
        has_adjacent_pairs=True,
    ),
    Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 8},
        read=keys.seed_oss,
        gguf="seed_oss",
        gguf_names={"post_attention_norm": "post_attention_layernorm"},
    ),
    Architecture(
        "MinistralForCausalLM", "ministral", {"sliding_window": 4096, "num_key_value_heads": 8}, read=keys.phi3
    ),
    Architecture(
        "Ministral3ForCausalLM",
        "ministral3",
        {"head_dim": 128, "num_key_value_heads": 8},
        read=keys.ministral3,
        gguf="mistral3",
        gguf_keys={"attention.temperature_scale": "llama_4_scaling_beta"},
        gguf_is_permuted=True,
    ),
    Architecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        fields={"qk_norm": "after_rope"},
        read=keys.attention_biases,
        names={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
        has_rope_alpha=True,
        gguf="hunyuan-dense",
        gguf_names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
)
ARCHITECTURES = {each.name: each for each in _ALL}
ARCHITECTURES["Ernie4_5_ForCausalLM"] = ARCHITECTURES["Ernie4_5ForCausalLM"]  # of the first checkpoints
OF_GGUF = {each.gguf: each for each in _ALL if each.gguf}

# In the checkpoints of vision models: prefixes of the language model's tensors -> their replacements; other prefixes.
_TEXT = {"language_model.": "", "model.language_model.": "model."}
_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_name(name: str) -> str | None:
    """Return the name that a vision model's tensor has in a checkpoint of the language model alone.

    Return None if the tensor is for images. Names of other models are returned unchanged.
    """
    if name.startswith(_IMAGES):
        return None
    prefix = next(filter(name.startswith, _TEXT), "")
    return _TEXT.get(prefix, "") + name.removeprefix(prefix)
