"""A checkpoint's architecture, read from its configuration and validated once.

`ModelConfig.from_hf` reads a Hugging Face ``config.json`` as plain data. Keys that change the arithmetic are either
supported or rejected by name. Required keys have no defaults: a model with a wrong value can write plausible text for a
hundred tokens and nonsense afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minillm.errors import WeightsError
from minillm.forms import kv_row_bytes
from minillm.model.rope_config import RopeConfig, read_rope
from minillm.text.reading import Values, shown

_LLAMA, _MISTRAL, _SMOLLM3 = "LlamaForCausalLM", "MistralForCausalLM", "SmolLM3ForCausalLM"
_QWEN2, _QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_INTERNLM3 = "InternLM3ForCausalLM"  # Llama, but with different keys for the biases
_ARCHITECTURES = {
    "llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2, "qwen3": _QWEN3, "smollm3": _SMOLLM3,
    "internlm3": _INTERNLM3,
}  # fmt: skip
# Defaults of missing config.json keys that differ between architectures in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _MISTRAL: {"sliding_window": 4096},
    _QWEN2: {"sliding_window": 4096, "max_window_layers": 28},
    _QWEN3: {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    _INTERNLM3: {"head_dim": 128},
    _SMOLLM3: {"no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
}
_FULL, _WINDOWED = "full_attention", "sliding_attention"  # possible values in layer_types

# Limits far above any model, so that a forged size cannot cause long loops. Sizes are checked against the file later.
_MAX_LAYERS, _MAX_HEADS, _MAX_WIDTH, _MAX_VOCAB = 1 << 14, 1 << 16, 1 << 24, 1 << 24
_MAX_TOKENS = 1 << 24
# Unsupported keys of generation_config.json that change answers, with their neutral values.
_UNSUPPORTED: dict[str, Any] = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "penalty_alpha": 0.0,
    "guidance_scale": 1.0, "num_beams": 1, "min_length": 0, "encoder_repetition_penalty": 1.0, "stop_strings": None,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The architecture and dimensions of a Llama-family decoder. Sizes are in elements.

    ``max_position_embeddings`` is in tokens. Special token ids beyond the vocabulary are dropped. ``eos_token_ids``
    lacks the tokenizer's own end token, which ends a chat turn; the engine adds it.
    """

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
    attention_bias: bool = False  # whether q, k and v have biases
    output_bias: bool = False  # whether o has a bias
    mlp_bias: bool = False  # whether gate, up and down have biases
    qk_norm: bool = False  # RMSNorm of each head of q and k before the rotary embedding
    layers_without_rope: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()  # each layer's attention window in tokens, see `Pages.window`; empty: none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # generation_config.json's if it has any, as in transformers' ``generate``
    dtype: str | None = None  # dtype of the saved checkpoint, if config.json has it
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # see `_generation_defaults`

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases. Tied embeddings are counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        attention += (self.hidden_size if self.output_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Return the bytes of one token's K and V over all layers.

        ``element_size`` is the bytes of an element in the KV cache; 1 also counts scales: see `kv_row_bytes`.
        """
        return 2 * self.num_layers * self.num_kv_heads * kv_row_bytes(self.head_dim, element_size)

    @property
    def longest_context(self) -> int:
        """Maximum tokens of a sequence: the trained context, times the scaling factor if rope scaling is dynamic."""
        stretch = self.rope.factor if self.rope.type == "dynamic" else 1.0
        return int(self.max_position_embeddings * max(1.0, stretch))

    @property
    def rope_changes_beyond(self) -> int | None:
        """The sequence length in tokens above which a token's rotary angles also depend on that length. None: never.

        K of the same tokens then differs between sequences, so equal tokens are not enough to share their blocks.
        """
        if self.rope.type == "dynamic":
            return self.max_position_embeddings
        return self.rope.original_max_position_embeddings if self.rope.type == "longrope" else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the contents of a ``config.json`` (old and new key layouts) and a ``generation_config.json``.

        Raises:
            WeightsError: a required key is missing or has the wrong type, or a value is unsupported.
        """
        values, of_generation = Values("config.json", config), Values("generation_config.json", generation or {})
        architecture = _architecture(values)
        values = Values(values.where, {**_DEFAULTS.get(architecture, {}), **config})
        num_layers = values.integer("num_hidden_layers", most=_MAX_LAYERS)
        heads = values.integer("num_attention_heads", most=_MAX_HEADS)
        kv_heads = values.integer("num_key_value_heads", heads, most=_MAX_HEADS)
        hidden = values.integer("hidden_size", most=_MAX_WIDTH)
        head_dim = _head_dim(values, hidden, heads)
        if heads % kv_heads:
            raise WeightsError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        context = values.integer("max_position_embeddings")
        vocab = values.integer("vocab_size", most=_MAX_VOCAB)
        _refuse_unsupported(values)
        attention_bias, output_bias, mlp_bias = _biases(values, architecture)
        no_rope = _layers_without_rope(values, num_layers) if architecture == _SMOLLM3 else ()
        ends = of_generation.token_ids("eos_token_id", vocab), values.token_ids("eos_token_id", vocab)
        dtype = config.get("dtype") or config.get("torch_dtype")
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=values.integer("intermediate_size", most=_MAX_WIDTH),
            rms_norm_eps=values.number("rms_norm_eps"),
            max_position_embeddings=context,
            rope=read_rope(values, context, head_dim),
            tie_word_embeddings=values.flag("tie_word_embeddings"),
            attention_bias=attention_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=architecture == _QWEN3,
            layers_without_rope=no_rope,
            windows=_windows(values, architecture, num_layers, no_rope),
            bos_token_id=next(iter(values.token_ids("bos_token_id", vocab)), None),
            eos_token_ids=ends[0] or ends[1],
            dtype=dtype if isinstance(dtype, str) else None,
            generation_defaults=_generation_defaults(of_generation),
        )


def _architecture(values: Values) -> str:
    names, known = values.values.get("architectures"), _ARCHITECTURES.values()
    if not names:
        kind = values.text("model_type", "(none named)")
        names = [_ARCHITECTURES.get(kind, kind)]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise values.error("architectures", "a list of names")
    if names[0] not in known:
        raise WeightsError(
            f"config.json: architecture {shown(names[0])} is not supported; supported: {', '.join(known)}"
        )
    return names[0]


def _biases(values: Values, architecture: str) -> tuple[bool, bool, bool]:
    """Return three flags: whether q, k and v have biases, whether o has one, and whether the MLP has biases."""
    if architecture == _INTERNLM3:
        others = values.flag("bias", values.flag("mlp_bias"))
        return values.flag("qkv_bias", values.flag("attention_bias")), others, others
    of_attention = values.flag("attention_bias")
    return of_attention or architecture == _QWEN2, of_attention and architecture != _QWEN2, values.flag("mlp_bias")


def _head_dim(values: Values, hidden: int, heads: int) -> int:
    if not values.has("head_dim") and hidden % heads:
        raise WeightsError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; head_dim is missing"
        )
    head_dim = values.integer("head_dim", hidden // heads, most=_MAX_WIDTH)
    if head_dim % 2:
        raise WeightsError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _refuse_unsupported(values: Values) -> None:
    activation = values.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise WeightsError(f"config.json: hidden_act {shown(activation)} is not supported; supported: 'silu'")
    quantization = values.part("quantization_config")
    if quantization.values:
        method = quantization.text("quant_method", "unknown")
        raise WeightsError(
            f"config.json: quantized weights ({shown(method)}) are not supported; "
            "use the unquantized model or a .gguf file"
        )


def _layers_without_rope(values: Values, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers that do not rotate q and k.

    They have a 0 in ``no_rope_layers``. Without that key, every ``no_rope_layer_interval``-th layer is one.
    """
    if not values.has("no_rope_layers"):
        interval = values.integer("no_rope_layer_interval")
        return tuple(range(interval - 1, num_layers, interval))
    turns = values.values["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) < num_layers or any(each not in (0, 1) for each in turns):
        raise values.error("no_rope_layers", f"a list of {num_layers} numbers, 0 or 1")
    return tuple(index for index in range(num_layers) if not turns[index])


def _windows(values: Values, architecture: str, num_layers: int, no_rope: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return each layer's attention window, interpreted as in transformers. Return an empty tuple if no layer has one.

    Llama has none: transformers ignores these keys in its config.json.
    """
    if architecture in (_LLAMA, _INTERNLM3):
        return ()
    window = None
    if values.has("sliding_window") and (architecture == _MISTRAL or values.flag("use_sliding_window")):
        window = values.integer("sliding_window")
    having: Collection[int] = no_rope if architecture == _SMOLLM3 else range(num_layers)
    if architecture in (_QWEN2, _QWEN3):
        having = range(values.integer("max_window_layers", least=0), num_layers)
    kinds = [_WINDOWED if window is not None and i in having else _FULL for i in range(num_layers)]
    if values.has("layer_types"):
        given = values.values["layer_types"]
        known = isinstance(given, list) and all(each in (_FULL, _WINDOWED) for each in given)
        if not known or len(given) != num_layers:
            raise values.error("layer_types", f"a list of {num_layers} of {_FULL!r} and {_WINDOWED!r}")
        if (_WINDOWED in given and window is None) or (architecture == _MISTRAL and given != kinds):
            raise WeightsError("config.json: layer_types and sliding_window contradict each other")
        kinds = given
    return tuple(window if each == _WINDOWED else None for each in kinds) if _WINDOWED in kinds else ()


def ignored_settings(generation: Mapping[str, Any]) -> list[str]:
    """Return the keys of a generation_config.json that would change answers, but that minillm ignores."""
    return [name for name, neutral in _UNSUPPORTED.items() if generation.get(name) not in (None, neutral, [], {})]


def _generation_defaults(values: Values) -> dict[str, Any]:
    """Return the sampling parameters in a generation_config.json, by their keys.

    Raises WeightsError for a wrong value.
    """
    checks: dict[str, Callable[[str], Any]] = {
        "temperature": partial(values.number, most=1e6),
        "top_p": partial(values.positive, most=1.0),
        "top_k": partial(values.integer, least=-1, most=1 << 31),
        "min_p": partial(values.number, most=1.0),
        "repetition_penalty": partial(values.positive, most=100.0),
        "no_repeat_ngram_size": partial(values.integer, least=0, most=_MAX_TOKENS),
        "max_new_tokens": partial(values.integer, most=_MAX_TOKENS),
        "min_new_tokens": partial(values.integer, least=0, most=_MAX_TOKENS),
        "do_sample": values.flag,
    }
    found = {key: check(key) for key, check in checks.items() if values.has(key)}
    return found | {"top_k": max(0, found["top_k"])} if "top_k" in found else found
