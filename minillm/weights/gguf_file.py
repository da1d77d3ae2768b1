"""Checkpoints in GGUF files, read under Hugging Face's tensor names. The gguf library dequantizes them to float32."""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from minillm.errors import WeightsError
from minillm.kernels import LowBit
from minillm.kernels.linear.low_bit.layouts import GROUP, in_eight_bits
from minillm.model.architecture_keys import FULL, WINDOWED
from minillm.model.architectures import ARCHITECTURES, OF_GGUF
from minillm.model.config import ModelConfig
from minillm.model.loader import parameter_shapes
from minillm.text.gguf_tokens import end_ids, special_ids
from minillm.text.reading import Values, shown
from minillm.text.safe import clean_line
from minillm.weights.gguf_blocks import low_bit
from minillm.weights.gguf_header import Header, TensorInfo, read_header
from minillm.weights.stored import LOW_BIT

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # those of Llama: see `Architecture.gguf_names`
_ROPE_FACTORS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_MAX_ROPE_FACTORS = 1 << 16
_SCALING_TYPES = ("none", "linear", "yarn", "longrope")
_FOLLOWED = (
    *("type", "factor", "attn_factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"),
    "finetuned",  # changes nothing
)


class GGUFCheckpoint:
    """A ``.gguf`` file of a Llama-family model. Raises WeightsError if the file is damaged or not supported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        header = _whole_header(path)
        if "general.architecture" in header.metadata:
            check_architecture(Values(str(path), header.metadata))  # first: it explains more than an unknown tensor
        self._data = np.memmap(path, mode="r", dtype=np.uint8)
        for info in header.tensors.values():
            self._span(info)
        factors = {name: self._rope_factors(header, name) for name in (_ROPE_FACTORS, _SHORT, _LONG)}
        self.config: dict[str, Any] = _config(header, factors, path)
        found = (each for info in header.tensors.values() for each in self._unfused(info))
        self._architecture = OF_GGUF[header.metadata["general.architecture"]]
        names = {**_LAYER_NAMES, **self._architecture.gguf_names}
        self._tensors = {_hf_name(info.name, names): info for info in found if info.name not in factors}
        self.generation_config: dict[str, Any] = {}
        self.tokenizer_source = header.metadata
        self._zeros = _absent_biases(self._tensors, self.config)

    def names(self) -> list[str]:
        return [*self._tensors, *self._zeros]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._zeros.get(name) or self._tensors[name].shape

    def stored_as(self, name: str) -> str:
        return "F32" if name in self._zeros else GGMLQuantizationType(self._tensors[name].type).name

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Read one tensor, or only some of its rows and columns, as float32."""
        if name in self._zeros:
            return torch.zeros(self._zeros[name])[rows or slice(None)]
        tensor = torch.from_numpy(self._in_order(name, self._dequantized(self._tensors[name])))
        if name.endswith("norm.weight"):  # llama.cpp's converter adds the offset
            tensor = tensor - self._architecture.fields.get("norm_offset", 0.0)
        return tensor[rows or slice(None)] if columns is None else tensor[rows or slice(None), columns]

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """Return a quantized matrix, or some of its rows and columns, still quantized and in the kernels' layout.

        GGUF types for which no kernel exists are requantized to 8 bits. Return None if the tensor is not a quantized
        matrix, or if ``columns`` splits a block.
        """
        info = self._tensors.get(name)
        if info is None or len(info.shape) != 2:
            return None
        kind, (num_rows, width) = GGMLQuantizationType(info.type), info.shape
        block, size = GGML_QUANT_SIZES[kind]
        if kind.name not in LOW_BIT:
            return in_eight_bits(self.tensor(name, rows, columns).to(device)) if block >= GROUP else None
        taken = columns or slice(0, width)
        if taken.start % block or taken.stop % block:
            return None
        raw = self._in_order(name, self._data[self._span(info)].reshape(num_rows, -1))
        raw = raw[rows or slice(None), taken.start // block * size : taken.stop // block * size]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is read-only; nothing writes to it
            there = torch.from_numpy(np.ascontiguousarray(raw)).to(device)
        return low_bit(there, kind, taken.stop - taken.start)

    def _in_order(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return a tensor with its rows in Hugging Face's order. In some GGUF files, rows of q and k are permuted."""
        projection = re.search(r"\.(q|k)_proj\.(weight|bias)$", name)
        if projection is None or not self._architecture.gguf_is_permuted:
            return values
        heads = self.config["num_attention_heads" if projection[1] == "q" else "num_key_value_heads"]
        if values.shape[0] % (2 * heads):
            raise WeightsError(f"{self._path}: {name} has {values.shape[0]} rows, which {heads} heads cannot share")
        return _unpermute(values, heads)

    def _unfused(self, info: TensorInfo) -> list[TensorInfo]:
        """Split an ``attn_qkv`` tensor by rows into q, k and v. Return any other tensor as it is."""
        is_fused = re.fullmatch(r"blk\.\d+\.attn_qkv\.(weight|bias)", info.name)
        if not is_fused or "attn_qkv" in self._architecture.gguf_names:
            return [info]
        heads = self.config["num_attention_heads"], *2 * (self.config["num_key_value_heads"],)
        rows = [count * self.config["head_dim"] for count in heads]
        if info.shape[0] != sum(rows):
            raise WeightsError(
                f"{self._path}: tensor {info.name} has {info.shape[0]} rows, but q, k and v together have {sum(rows)}"
            )
        span, parts, offset = self._span(info), [], info.offset
        for name, count in zip("qkv", rows, strict=True):
            part = replace(info, name=info.name.replace("qkv", name), shape=(count, *info.shape[1:]), offset=offset)
            offset += (span.stop - span.start) // sum(rows) * count
            parts.append(part)
        return parts

    def _span(self, info: TensorInfo) -> slice:
        """Return the range of a tensor's bytes in the file. Raises WeightsError if its type or size is invalid."""
        where = f"{self._path}: tensor {clean_line(info.name)}"
        try:
            kind = GGMLQuantizationType(info.type)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise WeightsError(
                f"{where} has the unknown type number {info.type}; a newer gguf package may know it"
            ) from None
        if info.shape[-1] % block:
            raise WeightsError(f"{where} has rows of {info.shape[-1]}, not a multiple of {block}")
        end = info.offset + math.prod(info.shape) // block * size
        if end > len(self._data):
            raise WeightsError(f"{self._path}: the file is cut short within tensor {clean_line(info.name)}")
        return slice(info.offset, end)

    def _rope_factors(self, header: Header, name: str) -> list[float] | None:
        info = header.tensors.get(name)
        if info is None:
            return None
        if len(info.shape) != 1 or info.shape[0] > _MAX_ROPE_FACTORS:
            raise WeightsError(f"{self._path}: tensor {name} has shape {info.shape}, which fits no head")
        return self._dequantized(info).tolist()

    def _dequantized(self, info: TensorInfo) -> np.ndarray:
        num_rows = math.prod(info.shape[:-1])
        raw = self._data[self._span(info)].reshape(num_rows, -1)
        kind = GGMLQuantizationType(info.type)
        try:
            values = dequantize(np.ascontiguousarray(raw), kind)
        except NotImplementedError:
            raise WeightsError(
                f"{self._path}: tensor {clean_line(info.name)} is {kind.name}, which the gguf package cannot dequantize"
            ) from None
        return np.require(values.reshape(info.shape), dtype=np.float32, requirements=["C", "W"])  # torch wants both


def _whole_header(path: Path) -> Header:
    """Read a file's header. Raises WeightsError if the file holds only a part of a split model."""
    named = re.search(r"-(\d{5})-of-(\d{5})\.gguf$", path.name)
    try:
        header = read_header(path)
        parts = Values(str(path), header.metadata).integer("split.count", 1, least=0)
    except WeightsError:
        if named is None or named[2] == "00001":
            raise
        parts = int(named[2])  # later parts of a split file may have no header
    if parts <= 1:
        return header
    raise WeightsError(
        f"{path}: this is one part of a model that was split into {parts} files; "
        "merge them with `llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf` and load that"
    )


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    if name in _NAMES:
        return _NAMES[name]
    parts = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if parts and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    return name  # the loader rejects it by name


def _absent_biases(tensors: dict[str, TensorInfo], config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of biases that the configuration announces, but that the file does not have.

    Such a bias is zero. (In llama.cpp each bias is optional, while one flag in config.json covers several of them.)
    """
    shapes = parameter_shapes(ModelConfig.from_hf(config))
    return {name: shape for name, shape in shapes if name.endswith(".bias") and name not in tensors}


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's permutation of the rows of q or k.

    llama.cpp puts the two dimensions of a rotary pair next to each other. Hugging Face puts them half a head apart.
    """
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def check_architecture(metadata: Values) -> str:
    """Return the architecture of a file. Raises WeightsError if it is not supported."""
    if metadata.text("general.type", "model") == "adapter":
        raise WeightsError(
            f"{metadata.where}: this is a LoRA adapter, which is not a whole model: merge it into its "
            "base model (`llama-export-lora`) and load the result"
        )
    architecture = metadata.text("general.architecture", "(none named)")
    if architecture not in OF_GGUF:
        known = ", ".join(map(repr, OF_GGUF))
        raise WeightsError(f"{metadata.where}: architecture {shown(architecture)} is not supported; supported: {known}")
    if metadata.values.get(f"{architecture}.expert_count", 0):
        raise WeightsError(
            f"{metadata.where}: mixture-of-experts models ({architecture}.expert_count) are not supported"
        )
    return architecture


def _config(header: Header, factors: dict[str, list[float] | None], path: Path) -> dict[str, Any]:
    """Return the content of the config.json that corresponds to the file's metadata."""
    metadata = Values(str(path), header.metadata)
    architecture = check_architecture(metadata)
    found = OF_GGUF[architecture]

    def count(key: str, default: int | None = None, least: int = 1) -> int:
        return metadata.integer(f"{architecture}.{key}", default, least=least)

    heads, hidden = count("attention.head_count"), count("embedding_length")
    embedding = header.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else count("vocab_size")
    head_dim = count("attention.key_length", hidden // heads)
    turned = count("rope.dimension_count", head_dim)
    if turned != head_dim and not found.has_partial_rope:
        raise WeightsError(f"{path}: rotary over {turned} of {head_dim} dimensions (partial rotary) is not supported")
    biases = any(re.search(r"attn_(q|k|v|qkv|output)\.bias$", name) for name in header.tensors)
    config: dict[str, Any] = {
        "architectures": [found.name],
        "model_type": found.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": count("feed_forward_length"),
        "vocab_size": vocab_size,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive(f"{architecture}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": architecture == "qwen2" or biases,
        "attention_out_bias": any(name.endswith("attn_output.bias") for name in header.tensors),
        "mlp_bias": any(re.search(r"ffn_(gate|up|down)\.bias$", name) for name in header.tensors),
        "bos_token_id": special_ids(metadata, vocab_size).get("bos"),
        "eos_token_id": end_ids(metadata, vocab_size),
    }
    if found.has_partial_rope:
        config["partial_rotary_factor"] = math.nextafter(turned / head_dim, 1.0)  # rounded down to ``turned`` again
    if "attention.scale" in found.gguf_keys:
        config[found.gguf_keys["attention.scale"]] = head_dim**-0.5
    config |= {
        name: metadata.number(f"{architecture}.{key}", least=-1e30)
        for key, name in found.gguf_keys.items()
        if metadata.values.get(f"{architecture}.{key}") != 0 and metadata.has(f"{architecture}.{key}")  # 0: not set
    }
    config |= _windows(metadata, architecture, config["num_hidden_layers"])
    if architecture == "gemma3":  # llama.cpp knows the factor on q by the number of layers
        config["query_pre_attn_scalar"] = hidden / heads if config["num_hidden_layers"] == 62 else head_dim
    if scaling := _rope_scaling(metadata, f"{architecture}.rope.", factors):
        config["rope_scaling"] = scaling
    if original := scaling.get("original_max_position_embeddings"):
        config["original_max_position_embeddings"] = original
    if architecture == "granite" and not metadata.flag("granite.rope.scaling.finetuned", True):
        raise WeightsError(f"{path}: granite.rope.scaling.finetuned false (no rotary embedding) is not supported")
    return config


def _windows(metadata: Values, architecture: str, num_layers: int) -> dict[str, Any]:
    """Return config.json keys and values for the attention windows of a file, or {} if it has none."""
    found, prefix = OF_GGUF[architecture], f"{architecture}.attention.sliding_window"
    has_windows = "attention.sliding_window" in found.gguf_keys
    if not (window := metadata.integer(prefix, 0, least=0)):
        return {"sliding_window": None} if has_windows else {}
    windowed = ARCHITECTURES.get(found.gguf_with_windows, found)
    if windowed is found and not has_windows:
        raise WeightsError(f"{metadata.where}: {prefix} is not supported")
    config = {"architectures": [windowed.name], "model_type": windowed.model_type, "sliding_window": window}
    pattern = metadata.values.get(f"{prefix}_pattern")
    if not isinstance(pattern, list):
        return config | ({} if pattern is None else {"sliding_window_pattern": pattern})
    return config | {"layer_types": [WINDOWED if each else FULL for each in pattern]}


def _rope_scaling(metadata: Values, rope: str, factors: Mapping[str, list[float] | None]) -> dict[str, Any]:
    """Convert a file's metadata to the ``rope_scaling`` of a config.json. The result is empty without scaling.

    The metadata is interpreted as in llama.cpp, with one exception: YaRN's betas. llama.cpp ignores them for these
    architectures. They are applied here, as in transformers. Raises WeightsError for unsupported keys that change
    angles.

    Args:
        rope: the prefix of the metadata keys.
        factors: divisors of the frequencies, one per pair of dimensions, by the names of their tensors. GGUF stores
            Llama 3's scaling this way, and LongRoPE's two lists.
    """
    prefix = f"{rope}scaling."
    kind = metadata.text(f"{prefix}type", "linear")  # files of 2023 omit it: there was no other type
    if kind not in _SCALING_TYPES:
        known = ", ".join(_SCALING_TYPES)
        raise WeightsError(f"{metadata.where}: rope scaling {shown(kind)} is not supported; supported: {known}")
    # Unsupported keys are accepted with these values, which change nothing. The first two keys are for other
    # architectures. The third is the weight of YaRN's ramp; -1 means "not set".
    ramp = 1.0 if kind == "yarn" else 0.0
    followed = (*_FOLLOWED, "yarn_log_multiplier") if rope == "mistral3.rope." else _FOLLOWED
    neutral = {"yarn_log_multiplier": (0.0,), "yarn_attn_factor": (1.0,), "yarn_ext_factor": (ramp, -1.0)}
    for key, value in metadata.values.items():
        name = key.removeprefix(prefix)
        if name != key and name not in followed and value not in neutral.get(name, ()):
            raise WeightsError(f"{metadata.where}: {clean_line(key, 80)} {shown(value)} is not supported")
    scaling: dict[str, Any] = {}
    factor = metadata.number(f"{prefix}factor", metadata.number(f"{rope}scale_linear", 0.0)) or 1.0
    original = metadata.integer(f"{prefix}original_context_length", 0, least=0)
    amplitude = metadata.positive(f"{prefix}attn_factor", 1.0)
    if factors[_SHORT] is not None or kind == "longrope":
        if factors[_SHORT] is None or factors[_LONG] is None or not original:
            raise WeightsError(
                f"{metadata.where}: longrope needs {_SHORT}, {_LONG} and {prefix}original_context_length"
            )
        scaling = {"rope_type": "longrope", "short_factor": factors[_SHORT], "long_factor": factors[_LONG]}
        return {**scaling, "attention_factor": amplitude, "original_max_position_embeddings": original}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if original:
            scaling["original_max_position_embeddings"] = original
        if rope == "olmo2.rope." and amplitude != 1.0:  # OLMo 3's converter writes the whole factor
            scaling["attention_factor"], amplitude = amplitude, 1.0
        if multiplier := metadata.number(f"{prefix}yarn_log_multiplier", 0.0):
            scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"{prefix}yarn_{name}"):
                scaling[name] = metadata.positive(f"{prefix}yarn_{name}")
    elif kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    if amplitude != 1.0:
        scaling = {"rope_type": "default", **scaling, "amplitude": amplitude}
    if factors[_ROPE_FACTORS] is not None:
        scaling = {"rope_type": "default", **scaling, "frequency_factors": factors[_ROPE_FACTORS]}
    return scaling
