"""A checkpoint's architecture, as its configuration describes it, checked once.

`ModelConfig.from_hf` reads a Hugging Face ``config.json`` as plain data. Keys that change the arithmetic are either
supported or refused by name; a required key has no default, because a wrong default talks well for a hundred tokens
and nonsense after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minillm.errors import WeightsError
from minillm.model.rope_config import RopeConfig, read_rope
from minillm.text.reading import Values, shown

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}  # by model_type

# Far above any model; they keep a forged size from being counted up to. Sizes are compared with the file's later.
_MAX_LAYERS, _MAX_HEADS, _MAX_WIDTH, _MAX_VOCAB = 1 << 14, 1 << 16, 1 << 24, 1 << 24
_MISTRAL_WINDOW = 4096  # where a Mistral's config.json does not say: the default of transformers


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. All sizes in elements; ``max_position_embeddings`` in tokens.

    An id beyond the vocabulary is dropped. The engine adds the tokenizer's own end token, which ends a turn of a chat.
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
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # of generation_config.json where it names any, as transformers' ``generate``
    dtype: str | None = None  # of the checkpoint when it was saved, where it says so
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # see `_generation_defaults`

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

    @property
    def longest_context(self) -> int:
        """The most tokens of a sequence: the trained context, times its factor where rope scaling is ``dynamic``."""
        stretch = self.rope.factor if self.rope.type == "dynamic" else 1.0
        return int(self.max_position_embeddings * max(1.0, stretch))

    @property
    def rope_changes_beyond(self) -> int | None:
        """The sequence length above which rotary angles depend on that length, not on positions alone; None: never.

        K of the same tokens then differs between sequences, so their blocks must not be shared by tokens alone.
        """
        if self.rope.type == "dynamic":
            return self.max_position_embeddings
        return self.rope.original_max_position_embeddings if self.rope.type == "longrope" else None

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, max_model_len: int | None = None
    ) -> ModelConfig:
        """Read a ``config.json`` (old and new key layouts).

        ``max_model_len`` is the longest sequence that is wanted, in tokens; None: the model's context. Within its
        sliding window a model attends to everything and is supported; beyond it, it is not.

        Raises WeightsError where a required key is missing or of the wrong type, or names something unsupported.
        """
        values, of_generation = Values("config.json", config), Values("generation_config.json", generation or {})
        architecture = _architecture(values)
        heads = values.integer("num_attention_heads", most=_MAX_HEADS)
        kv_heads = values.integer("num_key_value_heads", heads, most=_MAX_HEADS)
        hidden = values.integer("hidden_size", most=_MAX_WIDTH)
        head_dim = _head_dim(values, hidden, heads)
        if heads % kv_heads:
            raise WeightsError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        context = values.integer("max_position_embeddings")
        vocab = values.integer("vocab_size", most=_MAX_VOCAB)
        _refuse_unsupported(values)
        if architecture == "MistralForCausalLM":
            _check_window(values, max_model_len or context)
        ends = of_generation.token_ids("eos_token_id", vocab), values.token_ids("eos_token_id", vocab)
        dtype = config.get("dtype") or config.get("torch_dtype")
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=values.integer("num_hidden_layers", most=_MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=values.integer("intermediate_size", most=_MAX_WIDTH),
            rms_norm_eps=values.number("rms_norm_eps"),
            max_position_embeddings=context,
            rope=read_rope(values, context, head_dim),
            tie_word_embeddings=values.flag("tie_word_embeddings"),
            attention_bias=values.flag("attention_bias"),
            mlp_bias=values.flag("mlp_bias"),
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


def _head_dim(values: Values, hidden: int, heads: int) -> int:
    if not values.has("head_dim") and hidden % heads:
        raise WeightsError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}; no head_dim is given"
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
            f"config.json: quantised weights ({shown(method)}) are not supported; "
            "use the unquantised model or a .gguf file"
        )


def _check_window(values: Values, longest: int) -> None:
    """Attention over a sliding window is not supported; a sequence that lies within it does not notice.

    Only Mistral has one: transformers passes over the key in a Llama's config.json.
    """
    if "sliding_window" in values.values and not values.has("sliding_window"):
        return
    window = values.integer("sliding_window", _MISTRAL_WINDOW)
    if longest > window:
        raise WeightsError(
            f"config.json: attention over a sliding_window ({window} tokens) is not supported beyond it; "
            f"run the model within it with --max-model-len {window}"
        )


def _generation_defaults(values: Values) -> dict[str, Any]:
    """The sampling parameters of generation_config.json, as far as it has them."""
    checks: dict[str, Callable[[str], Any]] = {
        "temperature": partial(values.number, most=1e6),
        "top_p": partial(values.positive, most=1.0),
        "top_k": partial(values.integer, least=-1, most=1 << 31),
        "repetition_penalty": partial(values.positive, most=100.0),
        "do_sample": values.flag,
    }
    found = {key: check(key) for key, check in checks.items() if values.has(key)}
    return found | {"top_k": max(0, found["top_k"])} if "top_k" in found else found
