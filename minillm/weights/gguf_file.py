"""Checkpoints in a GGUF file: dequantised to float32, under Hugging Face's names.

The gguf library dequantises; the header is read by `minillm.weights.gguf_header`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.errors import WeightsError
from minillm.text.safe import clean_line
from minillm.weights.gguf_header import Header, TensorInfo, read_header

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """A ``.gguf`` file of the llama architecture.

    Raises:
        WeightsError: the file is damaged, or of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_header(path)
        self._data = np.memmap(path, mode="r", dtype=np.uint8)
        self._tensors = {_hf_name(name): info for name, info in header.tensors.items() if name != _ROPE_FACTORS}
        for info in header.tensors.values():
            self._span(info)
        factors = self._dequantised(header.tensors[_ROPE_FACTORS]) if _ROPE_FACTORS in header.tensors else None
        self.config: dict[str, Any] = _config(header, None if factors is None else factors.tolist(), path)
        self.generation_config: dict[str, Any] = {}
        self.tokenizer_source = header.metadata

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """One tensor in float32, or the given rows and columns of it."""
        values = self._dequantised(self._tensors[name])
        projection = re.search(r"\.(q|k)_proj\.(weight|bias)$", name)
        if projection:
            heads = self.config["num_attention_heads" if projection[1] == "q" else "num_key_value_heads"]
            if values.shape[0] % (2 * heads):
                raise WeightsError(f"{self._path}: {name} has {values.shape[0]} rows, which {heads} heads cannot share")
            values = _unpermute(values, heads)
        tensor = torch.from_numpy(values)
        if rows is not None:
            tensor = tensor[rows]
        return tensor if columns is None else tensor[:, columns]

    def _span(self, info: TensorInfo) -> slice:
        """A tensor's bytes, its type and size checked."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(info.type)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise WeightsError(
                f"{self._path}: tensor {clean_line(info.name)} has the unknown type number {info.type}; "
                "a newer gguf package may know it"
            ) from None
        if info.shape[-1] % block:
            raise WeightsError(
                f"{self._path}: tensor {clean_line(info.name)} has rows of {info.shape[-1]}, no multiple of {block}"
            )
        end = info.offset + math.prod(info.shape) // block * size
        if end > len(self._data):
            raise WeightsError(f"{self._path}: the file is cut short within tensor {clean_line(info.name)}")
        return slice(info.offset, end)

    def _dequantised(self, info: TensorInfo) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        num_rows = math.prod(info.shape[:-1])
        raw = self._data[self._span(info)].reshape(num_rows, -1)
        kind = GGMLQuantizationType(info.type)
        try:
            values = dequantize(np.ascontiguousarray(raw), kind)
        except NotImplementedError:
            raise WeightsError(
                f"{self._path}: tensor {clean_line(info.name)} is {kind.name}, which the gguf package cannot dequantise"
            ) from None
        return np.require(values.reshape(info.shape), dtype=np.float32, requirements=["C", "W"])  # torch wants both


def _hf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    parts = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if parts and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name  # the loader names it as one that it does not know


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores the rows of q and k so that the two halves of a rotary pair are neighbours; undo that."""
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _config(header: Header, factors: list[float] | None, path: Path) -> dict[str, Any]:
    """What config.json would say."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise WeightsError(
            f"{path}: architecture {clean_line(str(architecture))!r} is not supported; supported: 'llama'"
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"llama.{key}", default)
        if found is None:
            raise WeightsError(f"{path}: the metadata has no llama.{key}")
        return found

    if metadata.get("llama.expert_count", 0):
        raise WeightsError(f"{path}: mixture-of-experts models (llama.expert_count) are not supported")

    def count(key: str, default: Any = None) -> int:
        found = value(key, default)
        if type(found) is not int or found < 1:
            raise WeightsError(f"{path}: llama.{key} {found!r} is not a positive whole number")
        return found

    heads, hidden = count("attention.head_count"), count("embedding_length")
    embedding = header.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": count("attention.key_length", hidden // heads),
        "intermediate_size": count("feed_forward_length"),
        "vocab_size": embedding.shape[0] if embedding else count("vocab_size"),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            token_id
            for key in ("eos_token_id", "eot_token_id", "eom_token_id")
            if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None
        ],
    }
    dimensions = metadata.get("llama.rope.dimension_count", config["head_dim"])
    if dimensions != config["head_dim"]:
        raise WeightsError(
            f"{path}: rotary over {dimensions} of {config['head_dim']} dimensions (partial rotary) is not supported"
        )
    if scaling := _rope_scaling(metadata, factors, path):
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(metadata: dict[str, Any], factors: list[float] | None, path: Path) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    scaling: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": metadata.get("llama.rope.scaling.factor")}
        if "llama.rope.scaling.original_context_length" in metadata:
            scaling["original_max_position_embeddings"] = metadata["llama.rope.scaling.original_context_length"]
    elif kind != "none":
        raise WeightsError(f"{path}: rope scaling {clean_line(str(kind))!r} is not supported; supported: linear, yarn")
    if factors is not None:  # llama 3's scaling is stored as one factor per pair of dimensions
        scaling = {"rope_type": "default", **scaling, "frequency_factors": factors}
    return scaling or None
