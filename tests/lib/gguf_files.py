"""GGUF files of small random models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from lib.models import hf_model


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """q and k as llama.cpp's converter permutes them."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


# What llama.cpp's converter makes of a model_type.
ARCHITECTURES = {
    "mistral": "llama", "olmo3": "olmo2", "gemma3_text": "gemma3", "granitemoehybrid": "granite", "ministral": "llama",
    "ministral3": "mistral3", "hunyuan_v1_dense": "hunyuan-dense",
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite", "mistral3")


def converted(config: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes in addition to the sizes, for some architectures."""
    kind = config.model_type
    prefix, found = f"{ARCHITECTURES.get(kind, kind)}.", dict[str, Any]()
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if kind in ("olmo3", "exaone4", "gemma3_text") and config.sliding_window is not None:
        found["attention.sliding_window"] = config.sliding_window
        every_sixth = [(i + 1) % 6 != 0 for i in range(config.num_hidden_layers)]
        if kind != "gemma3_text" or [each == "sliding_attention" for each in config.layer_types] != every_sixth:
            found["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config.layer_types]
    if kind == "gemma3_text":
        found["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if kind == "glm4":
        found["rope.dimension_count"] = int(config.head_dim * rope["partial_rotary_factor"])
    if "granite" in kind:
        found |= {
            "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
        }  # fmt: skip
    if kind == "phi3":
        original, dim = config.original_max_position_embeddings, config.hidden_size // config.num_attention_heads
        found |= {
            "rope.scaling.original_context_length": original,
            "attention.sliding_window": config.sliding_window or 0,
        }
        found["rope.dimension_count"] = int(dim * rope["partial_rotary_factor"])
        if rope["rope_type"] == "longrope":
            scale = config.max_position_embeddings / original
            found["rope.scaling.attn_factor"] = (
                math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            )
    if kind == "ministral3":
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if "alpha" in rope:  # the converter also writes a context of 262,144
        found["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (config.head_dim / (config.head_dim - 2))
        found |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if kind == "olmo3" and "attention_factor" in rope:
            found["rope.scaling.attn_factor"] = rope["attention_factor"]
    return {prefix + key: value for key, value in found.items()}


def write_gguf(
    path: Path, model: Any, kind: gguf.GGMLQuantizationType, fused: Any = False, **metadata: Any
) -> dict[str, np.ndarray]:
    """Write a GGUF file of a Llama-family transformers model. Return the dequantized tensors by Hugging Face name.

    ``fused``: q, k and v are one tensor, as with the converter's ``--fuse-qkv``.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    permutes = architecture in PERMUTED
    offset = 1.0 if architecture == "gemma3" else 0.0  # of norms
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "shared_intermediate_size", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    tokens = [chr(256 + i) for i in range(config.vocab_size)]
    tokens[2] = tokens[0] + tokens[1]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    for key, value in metadata.items():
        adders: dict[type, Any] = {
            int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
            list: writer.add_array,
        }  # fmt: skip
        adders[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper().replace("-", "_")], config.num_hidden_layers)
    exact: dict[str, np.ndarray] = {}
    written: dict[str, list[np.ndarray]] = {}
    kinds: dict[str, gguf.GGMLQuantizationType] = {}
    for name, tensor in _unpacked(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        stored = values
        if permutes and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            stored = permuted(values, heads)
        if name.endswith("norm.weight"):
            stored = stored + offset
        this_kind = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored, this_kind)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        whole = re.sub(r"attn_[qkv]\.", "attn_qkv.", stored_name) if fused else stored_name
        written.setdefault(whole, []).append(data)
        kinds[whole] = this_kind
        back = gguf.quants.dequantize(data, this_kind)
        if permutes and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            back = back.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        exact[name] = back
    for name, parts in written.items():
        writer.add_tensor(name, np.concatenate(parts), raw_dtype=kinds[name])
    for length in ("long", "short"):
        if factors := config.rope_parameters.get(f"{length}_factor"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def _unpacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Split the MLP of Granite 4 as the converter does."""
    for name, tensor in tensors.items():
        if "shared_mlp.input_linear" in name:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"), rows
        else:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor


def gguf_model(**overrides: Any) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf_model(**{**sizes, **overrides})


class Without:
    """Return a transformers model with tensors that its file leaves out."""

    def __init__(self, model: Any, *endings: str) -> None:
        self.config = model.config
        self.kept = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(endings)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.kept
