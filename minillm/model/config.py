"""A checkpoint's architecture, read from its configuration and validated once.

`ModelConfig.from_hf` reads a Hugging Face ``config.json`` as plain data. Keys that change the arithmetic are either
supported or rejected by name. Required keys have no defaults: a model with a wrong value can write plausible text for a
hundred tokens and nonsense afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from minillm.errors import WeightsError
from minillm.model.architectures import ARCHITECTURES, Architecture
from minillm.model.rope_config import RopeConfig, read_ropes
from minillm.storage import kv_row_bytes
from minillm.text.reading import Values, shown
from minillm.text.safe import clean_line

# Name of an MLP's activation in this module -> (key in config.json, its values for this activation).
_ACTIVATIONS = {"silu": ("hidden_act", ("silu", "swish")), "gelu": ("hidden_activation", ("gelu_pytorch_tanh",))}
# Vision models. Their text_config describes a language model of another architecture.
VISION = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")

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
    does not contain the token with which the tokenizer ends a chat turn; the engine adds it.
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
    norms: Literal["before", "after", "both"] = "before"  # whether RMSNorms are before or after attention and MLP
    # RMSNorm of q and k: of each head before rotary ("heads") or after it, or of all heads together before it ("all")
    qk_norm: Literal["", "heads", "after_rope", "all"] = ""
    activation: Literal["silu", "gelu"] = "silu"  # the MLP's activation; "gelu" is the tanh approximation of GELU
    attention_scale: float | None = None  # factor on q @ k; None: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0  # factor on embeddings
    logits_scale: float = 1.0  # factor on logits
    norm_offset: float = 0.0  # added to the stored weights of RMSNorms
    local_rope: RopeConfig | None = None  # rotary embedding of layers with a window, if it differs from ``rope``
    layers_without_rope: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()  # each layer's attention window in tokens, see `Pages.window`; empty: none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # from generation_config.json, or else config.json, as transformers does
    dtype: str | None = None  # dtype of the saved checkpoint, if config.json has it
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # see `_generation_defaults`

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases. Tied embeddings are counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        attention += self.hidden_size if self.output_bias else 0
        heads_normed = {"": 0, "all": self.num_heads + self.num_kv_heads}.get(self.qk_norm, 2)
        norms = heads_normed * self.head_dim + self.hidden_size * (4 if self.norms == "both" else 2)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + norms) + self.hidden_size

    @property
    def softmax_scale(self) -> float:
        """The factor on the product of q and k."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Return the bytes of one token's K and V over all layers.

        ``element_size`` is the size of an element of the KV cache in bytes. If it is 1, scales are counted as well: see
        `kv_row_bytes`.
        """
        return 2 * self.num_layers * self.num_kv_heads * kv_row_bytes(self.head_dim, element_size)

    @property
    def longest_context(self) -> int:
        """Maximum tokens in a sequence: the trained context, or with dynamic rope scaling a multiple of it."""
        stretch = self.rope.factor if self.rope.type == "dynamic" else 1.0
        return int(self.max_position_embeddings * max(1.0, stretch))

    @property
    def rope_changes_beyond(self) -> int | None:
        """The sequence length in tokens above which a token's rotary angles also depend on the length. None: never.

        In longer sequences, K of equal tokens may differ. Sequences with equal tokens then cannot share blocks.
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
        of_text = values.part("text_config").values if _name(values) in VISION else {}
        values = Values(values.where, {**architecture.defaults, **config, **of_text})
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
        fields = {**architecture.fields, **architecture.read(values, num_layers)}
        _refuse_unsupported(values, fields.get("activation", "silu"))
        rope, local_rope = read_ropes(values, context, head_dim, architecture)
        ends = of_generation.token_ids("eos_token_id", vocab), values.token_ids("eos_token_id", vocab)
        dtype = values.values.get("dtype") or values.values.get("torch_dtype")
        common: dict[str, Any] = {
            "architecture": architecture.name,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_layers": num_layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": values.integer("intermediate_size", most=_MAX_WIDTH),
            "rms_norm_eps": values.number("rms_norm_eps"),
            "max_position_embeddings": context,
            "rope": rope,
            "local_rope": local_rope,
            "tie_word_embeddings": values.flag("tie_word_embeddings"),
            "bos_token_id": next(iter(values.token_ids("bos_token_id", vocab)), None),
            "eos_token_ids": ends[0] or ends[1],
            "dtype": dtype if isinstance(dtype, str) else None,
            "generation_defaults": _generation_defaults(of_generation),
        }
        return cls(**{**common, **fields})


def _name(values: Values) -> str:
    """Return the name of the architecture. If it is missing, return the model's type."""
    names = values.values.get("architectures")
    if not names:
        return values.text("model_type", "(none named)")
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise values.error("architectures", "a list of names")
    return names[0]


def _architecture(values: Values) -> Architecture:
    name = _name(values)
    if name in VISION:
        name = values.part("text_config").text("model_type", "(none named)")
    by_type = {each.model_type: each for each in ARCHITECTURES.values()}
    found = ARCHITECTURES.get(name) or by_type.get(name)
    if found is None:
        known = ", ".join(
            each.removesuffix("ForCausalLM") for each in dict.fromkeys(each.name for each in ARCHITECTURES.values())
        )
        given = clean_line(repr(name), 40)
        raise WeightsError(f"config.json: architecture {given} is not supported; supported: {known}")
    return found


def _head_dim(values: Values, hidden: int, heads: int) -> int:
    if not values.has("head_dim") and hidden % heads:
        raise WeightsError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; head_dim is missing"
        )
    head_dim = values.integer("head_dim", hidden // heads, most=_MAX_WIDTH)
    if head_dim % 2:
        raise WeightsError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _refuse_unsupported(values: Values, activation: str) -> None:
    key, supported = _ACTIVATIONS[activation]
    if (given := values.text(key, supported[0])) not in supported:
        raise WeightsError(f"config.json: {key} {shown(given)} is not supported; supported: {supported[0]!r}")
    quantization = values.part("quantization_config")
    if quantization.values:
        method = quantization.text("quant_method", "unknown")
        raise WeightsError(
            f"config.json: quantized weights ({shown(method)}) are not supported; "
            "use the unquantized model or a .gguf file"
        )


def ignored_settings(generation: Mapping[str, Any]) -> list[str]:
    """Return the keys of a generation_config.json that change answers in transformers, but that minillm ignores."""
    return [name for name, neutral in _UNSUPPORTED.items() if generation.get(name) not in (None, neutral, [], {})]


def _generation_defaults(values: Values) -> dict[str, Any]:
    """Return the sampling parameters in a generation_config.json, under the same keys as there.

    Raises WeightsError if a value is invalid.
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
