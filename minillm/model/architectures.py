"""The supported architectures. Each is described by how its config.json, tensors and GGUF files differ from Llama's.

An `Architecture` is data: defaults, names, flags. Its ``read`` function adds the `ModelConfig` fields that depend on
keys of config.json. ``docs/add-a-model.md`` follows the addition of one architecture.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import WeightsError
from minillm.text.reading import Values, shown

FULL, WINDOWED = "full_attention", "sliding_attention"  # possible values in layer_types
Fields = dict[str, Any]  # of `ModelConfig`


def _attention_biases(values: Values, num_layers: int) -> Fields:
    of_attention = values.flag("attention_bias")
    return {"attention_bias": of_attention, "output_bias": of_attention}


def _biases(values: Values, num_layers: int) -> Fields:
    return {**_attention_biases(values, num_layers), "mlp_bias": values.flag("mlp_bias")}


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
    read: Callable[[Values, int], Fields] = _biases
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


def _windows(values: Values, num_layers: int, having: Collection[int], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's attention window in tokens, or None for a layer without one, as in transformers.

    Return an empty tuple if no layer has a window. ``having`` are the indices of the layers with a window; the key
    ``layer_types`` overrides them.
    """
    kinds = [WINDOWED if window is not None and i in having else FULL for i in range(num_layers)]
    if values.has("layer_types"):
        given = values.values["layer_types"]
        known = isinstance(given, list) and all(each in (FULL, WINDOWED) for each in given)
        if not known or len(given) != num_layers:
            raise values.error("layer_types", f"a list of {num_layers} of {FULL!r} and {WINDOWED!r}")
        if WINDOWED in given and window is None:
            raise WeightsError("config.json: layer_types and sliding_window contradict each other")
        kinds = given
    return tuple(window if each == WINDOWED else None for each in kinds) if WINDOWED in kinds else ()


def _window(values: Values) -> int | None:
    return values.integer("sliding_window") if values.has("sliding_window") else None


def _used_window(values: Values) -> int | None:
    return _window(values) if values.has("sliding_window") and values.flag("use_sliding_window") else None


def _mistral(values: Values, num_layers: int) -> Fields:
    window = _window(values)
    windows = _windows(values, num_layers, range(num_layers), window)
    if values.has("layer_types") and windows != (() if window is None else (window,) * num_layers):
        raise WeightsError("config.json: layer_types and sliding_window contradict each other")
    return {**_biases(values, num_layers), "windows": windows}


def _qwen3(values: Values, num_layers: int) -> Fields:
    having = range(values.integer("max_window_layers", least=0), num_layers)
    windows = _windows(values, num_layers, having, _used_window(values))
    return {**_biases(values, num_layers), "windows": windows}


def _qwen2(values: Values, num_layers: int) -> Fields:
    return {**_qwen3(values, num_layers), "attention_bias": True, "output_bias": False}


def _smollm3(values: Values, num_layers: int) -> Fields:
    no_rope = _layers_without_rope(values, num_layers)
    windows = _windows(values, num_layers, no_rope, _used_window(values))
    return {**_biases(values, num_layers), "layers_without_rope": no_rope, "windows": windows}


def _layers_without_rope(values: Values, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers that do not rotate q and k.

    The list ``no_rope_layers`` has a 0 for these layers. Without that key, every ``no_rope_layer_interval``-th layer
    does not rotate.
    """
    if not values.has("no_rope_layers"):
        interval = values.integer("no_rope_layer_interval")
        return tuple(range(interval - 1, num_layers, interval))
    turns = values.values["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) < num_layers or any(each not in (0, 1) for each in turns):
        raise values.error("no_rope_layers", f"a list of {num_layers} numbers, 0 or 1")
    return tuple(index for index in range(num_layers) if not turns[index])


def _internlm3(values: Values, num_layers: int) -> Fields:
    others = values.flag("bias", values.flag("mlp_bias"))
    return {
        "attention_bias": values.flag("qkv_bias", values.flag("attention_bias")),
        "output_bias": others,
        "mlp_bias": others,
    }


def _every(values: Values, num_layers: int, default: int) -> tuple[int | None, ...]:
    """Return the layers' windows for a model in which every ``sliding_window_pattern``-th layer has no window."""
    period = num_layers + 1 if values.has("layer_types") else values.integer("sliding_window_pattern", default)
    return _windows(values, num_layers, [i for i in range(num_layers) if (i + 1) % period], _window(values))


def _olmo3(values: Values, num_layers: int) -> Fields:
    return {**_attention_biases(values, num_layers), "windows": _every(values, num_layers, 4)}


def _exaone4(values: Values, num_layers: int) -> Fields:
    """Return the fields of Exaone 4. Layers without a window do not rotate q and k.

    If the config sets no ``sliding_window`` at all, all layers rotate q and k.
    """
    windows = _every(values, num_layers, 4)
    without = tuple(i for i, window in enumerate(windows) if window is None) if _window(values) else ()
    no_rope = tuple(range(num_layers)) if _window(values) and not windows else without
    return {"windows": windows, "layers_without_rope": no_rope}


def _glm4(values: Values, num_layers: int) -> Fields:
    return {"attention_bias": values.flag("attention_bias")}


def _gemma3(values: Values, num_layers: int) -> Fields:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.has(key):
            raise WeightsError(f"config.json: {key} {shown(values.values[key])} is not supported; supported: null")
    if values.flag("use_bidirectional_attention"):
        raise WeightsError("config.json: use_bidirectional_attention is not supported")
    return {
        **_attention_biases(values, num_layers),
        "windows": _every(values, num_layers, 6),
        "attention_scale": values.positive("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": values.integer("hidden_size") ** 0.5,
    }


def _granite(values: Values, num_layers: int) -> Fields:
    """Return the fields of Granite, which has four constant factors.

    Granite multiplies the results of attention and MLP by r before it adds them to x. Here, x is divided by r instead,
    and the results are added unchanged. RMSNorm then returns the same if eps is divided by the square of r.
    """
    names = ("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling")
    residual, embedding, attention, logits = (values.number(name, 1.0, least=1e-6, most=1e6) for name in names)
    return {
        **_biases(values, num_layers),
        "rms_norm_eps": values.number("rms_norm_eps") / residual**2,
        "embedding_scale": embedding / residual,
        "attention_scale": attention,
        "logits_scale": 1 / logits,
    }


def _granite_hybrid(values: Values, num_layers: int) -> Fields:
    """Return the fields of a Granite 4 model. Raises WeightsError if it has Mamba layers or experts."""
    kinds = values.values.get("layer_types")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(each not in ("attention", FULL) for each in kinds)
    ):
        raise WeightsError(
            "config.json: layers of other layer_types than 'attention', such as Mamba, are not supported"
        )
    if values.integer("num_local_experts", 8, least=0):
        raise WeightsError("config.json: mixture-of-experts models (num_local_experts) are not supported")
    is_rotated = values.text("position_embedding_type", "nope") == "rope"
    return {
        **_granite(values, num_layers),
        "mlp_bias": False,
        "intermediate_size": values.integer("shared_intermediate_size", 1024, most=1 << 24),
        "layers_without_rope": () if is_rotated else tuple(range(num_layers)),
    }


def _phi3(values: Values, num_layers: int) -> Fields:
    return {"windows": _windows(values, num_layers, range(num_layers), _window(values))}


def _ernie(values: Values, num_layers: int) -> Fields:
    biases = _biases(values, num_layers)
    return {name: values.flag("use_bias", given) for name, given in biases.items()}


def _helium(values: Values, num_layers: int) -> Fields:
    return {**_biases(values, num_layers), "output_bias": False}


def _seed_oss(values: Values, num_layers: int) -> Fields:
    return {**_biases(values, num_layers), "output_bias": values.flag("attention_out_bias")}


def _ministral3(values: Values, num_layers: int) -> Fields:
    """Return the fields of Ministral 3, with its context limited to the original one.

    In a longer context, it multiplies q by a factor that depends on the position, which is not supported.
    """
    key, context = "llama_4_scaling_beta", values.integer("max_position_embeddings")
    rope = values.part("rope_parameters" if values.has("rope_parameters") else "rope_scaling")
    if not rope.values and not values.has("rope_theta"):
        raise values.error("rope_parameters", "an object")
    if rope.number(key, values.number(key, 0.0)):
        context = min(context, rope.integer("original_max_position_embeddings", context))
    return {**_phi3(values, num_layers), "max_position_embeddings": context}


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
    Architecture("MistralForCausalLM", "mistral", {"sliding_window": 4096}, read=_mistral),
    Architecture(
        "Qwen2ForCausalLM", "qwen2", {"sliding_window": 4096, "max_window_layers": 28}, read=_qwen2, gguf="qwen2"
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        {"qk_norm": "heads"},
        _qwen3,
        gguf="qwen3",
    ),
    Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        {"no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        read=_smollm3,
        gguf="smollm3",
        gguf_is_permuted=True,
    ),
    Architecture("InternLM3ForCausalLM", "internlm3", {"head_dim": 128}, read=_internlm3),
    Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        fields={"norms": "after", "qk_norm": "all"},
        read=_attention_biases,
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
        _olmo3,
        names=_NORMS_AFTER,
        has_two_ropes=True,
    ),
    Architecture(
        "Exaone4ForCausalLM",
        "exaone4",
        {"sliding_window": 4096},
        {"norms": "after", "qk_norm": "heads"},
        _exaone4,
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
        _glm4,
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
        _gemma3,
        names={**_NORMS_AFTER, "pre_feedforward_layernorm": "post_attention_layernorm"},
        has_two_ropes=True,
        gguf="gemma3",
        gguf_names={**_GGUF_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        gguf_keys={**_WINDOW_KEY, "rope.freq_base_swa": "rope_local_base_freq"},
    ),
    Architecture(
        "GraniteForCausalLM",
        "granite",
        read=_granite,
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
        read=_granite_hybrid,
        names={"shared_mlp": "mlp", "output_linear": "down_proj"},
        packed={"mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    Architecture(
        "Phi3ForCausalLM",
        "phi3",
        {"original_max_position_embeddings": 4096},
        read=_phi3,
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
        read=_ernie,
        has_adjacent_pairs=True,
        gguf="ernie4_5",
    ),
    Architecture(
        "HeliumForCausalLM",
        "helium",
        {"rope_theta": 100_000.0, "head_dim": 128, "num_key_value_heads": 20},
        read=_helium,
        has_adjacent_pairs=True,
    ),
    Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 8},
        read=_seed_oss,
        gguf="seed_oss",
        gguf_names={"post_attention_norm": "post_attention_layernorm"},
    ),
    Architecture("MinistralForCausalLM", "ministral", {"sliding_window": 4096, "num_key_value_heads": 8}, read=_phi3),
    Architecture(
        "Ministral3ForCausalLM",
        "ministral3",
        {"head_dim": 128, "num_key_value_heads": 8},
        read=_ministral3,
        gguf="mistral3",
        gguf_keys={"attention.temperature_scale": "llama_4_scaling_beta"},
        gguf_is_permuted=True,
    ),
    Architecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        fields={"qk_norm": "after_rope"},
        read=_attention_biases,
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
