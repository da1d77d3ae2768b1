"""The config.json keys of each architecture that change the model, read as fields of `ModelConfig`.

Each public function is the ``read`` of an entry of `minillm.model.architectures`. It returns the fields that depend on
keys, given the keys and the number of layers. It raises WeightsError for values that are wrong or not supported.
"""

from collections.abc import Collection
from typing import Any

from minillm.errors import WeightsError
from minillm.text.reading import Values, shown

FULL, WINDOWED = "full_attention", "sliding_attention"  # possible values in layer_types
Fields = dict[str, Any]  # of `ModelConfig`


def attention_biases(values: Values, num_layers: int) -> Fields:
    of_attention = values.flag("attention_bias")
    return {"attention_bias": of_attention, "output_bias": of_attention}


def biases(values: Values, num_layers: int) -> Fields:
    return {**attention_biases(values, num_layers), "mlp_bias": values.flag("mlp_bias")}


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


def mistral(values: Values, num_layers: int) -> Fields:
    window = _window(values)
    windows = _windows(values, num_layers, range(num_layers), window)
    if values.has("layer_types") and windows != (() if window is None else (window,) * num_layers):
        raise WeightsError("config.json: layer_types and sliding_window contradict each other")
    return {**biases(values, num_layers), "windows": windows}


def qwen3(values: Values, num_layers: int) -> Fields:
    having = range(values.integer("max_window_layers", least=0), num_layers)
    windows = _windows(values, num_layers, having, _used_window(values))
    return {**biases(values, num_layers), "windows": windows}


def qwen2(values: Values, num_layers: int) -> Fields:
    return {**qwen3(values, num_layers), "attention_bias": True, "output_bias": False}


def smollm3(values: Values, num_layers: int) -> Fields:
    no_rope = _layers_without_rope(values, num_layers)
    windows = _windows(values, num_layers, no_rope, _used_window(values))
    return {**biases(values, num_layers), "layers_without_rope": no_rope, "windows": windows}


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


def internlm3(values: Values, num_layers: int) -> Fields:
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


def olmo3(values: Values, num_layers: int) -> Fields:
    return {**attention_biases(values, num_layers), "windows": _every(values, num_layers, 4)}


def exaone4(values: Values, num_layers: int) -> Fields:
    """Return the fields of Exaone 4. Layers without a window do not rotate q and k.

    If the config sets no ``sliding_window`` at all, all layers rotate q and k.
    """
    windows = _every(values, num_layers, 4)
    without = tuple(i for i, window in enumerate(windows) if window is None) if _window(values) else ()
    no_rope = tuple(range(num_layers)) if _window(values) and not windows else without
    return {"windows": windows, "layers_without_rope": no_rope}


def glm4(values: Values, num_layers: int) -> Fields:
    return {"attention_bias": values.flag("attention_bias")}


def gemma3(values: Values, num_layers: int) -> Fields:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.has(key):
            raise WeightsError(f"config.json: {key} {shown(values.values[key])} is not supported; supported: null")
    if values.flag("use_bidirectional_attention"):
        raise WeightsError("config.json: use_bidirectional_attention is not supported")
    return {
        **attention_biases(values, num_layers),
        "windows": _every(values, num_layers, 6),
        "attention_scale": values.positive("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": values.integer("hidden_size") ** 0.5,
    }


def granite(values: Values, num_layers: int) -> Fields:
    """Return the fields of Granite, which has four constant factors.

    Granite multiplies the results of attention and MLP by r before it adds them to x. Here, x is divided by r instead,
    and the results are added unchanged. RMSNorm then returns the same if eps is divided by the square of r.
    """
    names = ("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling")
    residual, embedding, attention, logits = (values.number(name, 1.0, least=1e-6, most=1e6) for name in names)
    return {
        **biases(values, num_layers),
        "rms_norm_eps": values.number("rms_norm_eps") / residual**2,
        "embedding_scale": embedding / residual,
        "attention_scale": attention,
        "logits_scale": 1 / logits,
    }


def granite_hybrid(values: Values, num_layers: int) -> Fields:
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
        **granite(values, num_layers),
        "mlp_bias": False,
        "intermediate_size": values.integer("shared_intermediate_size", 1024, most=1 << 24),
        "layers_without_rope": () if is_rotated else tuple(range(num_layers)),
    }


def phi3(values: Values, num_layers: int) -> Fields:
    return {"windows": _windows(values, num_layers, range(num_layers), _window(values))}


def ernie(values: Values, num_layers: int) -> Fields:
    return {name: values.flag("use_bias", given) for name, given in biases(values, num_layers).items()}


def helium(values: Values, num_layers: int) -> Fields:
    return {**biases(values, num_layers), "output_bias": False}


def seed_oss(values: Values, num_layers: int) -> Fields:
    return {**biases(values, num_layers), "output_bias": values.flag("attention_out_bias")}


def ministral3(values: Values, num_layers: int) -> Fields:
    """Return the fields of Ministral 3, with its context limited to the original one.

    In a longer context, Ministral 3 multiplies q by a factor that depends on the position. This is not supported.
    """
    key, context = "llama_4_scaling_beta", values.integer("max_position_embeddings")
    rope = values.part("rope_parameters" if values.has("rope_parameters") else "rope_scaling")
    if not rope.values and not values.has("rope_theta"):
        raise values.error("rope_parameters", "an object")
    if rope.number(key, values.number(key, 0.0)):
        context = min(context, rope.integer("original_max_position_embeddings", context))
    return {**phi3(values, num_layers), "max_position_embeddings": context}
