"""Write models of any size without using disk space: real headers, then holes in sparse files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minillm.weights.shape import Shape
from minillm.weights.stored import BLOCKS, GGML_TYPES, PLAIN

LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256, 131072)
LLAMA_1B = Shape(16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True)
_HF = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
Tensors = dict[str, tuple[tuple[int, ...], str]]


def q4_k_m(name: str, layer: int, layers: int) -> str:
    """Return the tensor types of llama.cpp's mixture of this name."""
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if "norm" in name:
        return "F32"
    return "Q6_K" if name == "output" or (more and name in ("attn_v", "ffn_down")) else "Q4_K"


def parts(shape: Shape) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """GGUF name without layer, layer (-1: none) and shape of each tensor."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd", -1, (shape.vocabulary, shape.hidden)
    if not shape.tied:
        yield "output", -1, (shape.vocabulary, shape.hidden)
    yield "output_norm", -1, (shape.hidden,)
    for layer in range(shape.layers):
        for name, rows, columns in (
            ("attn_q", q, shape.hidden), ("attn_k", kv, shape.hidden), ("attn_v", kv, shape.hidden),
            ("attn_output", shape.hidden, q), ("ffn_gate", shape.intermediate, shape.hidden),
            ("ffn_up", shape.intermediate, shape.hidden), ("ffn_down", shape.hidden, shape.intermediate),
        ):  # fmt: skip
            yield name, layer, (rows, columns)
        yield "attn_norm", layer, (shape.hidden,)
        yield "ffn_norm", layer, (shape.hidden,)


def num_bytes(shape: Iterable[int], kind: str) -> int:
    count = 1
    for number in shape:
        count *= number
    block, size = BLOCKS.get(kind) or (1, PLAIN[kind])
    return count // block * size


def forge_gguf(path: Path, shape: Shape, kinds: Any = q4_k_m) -> Path:
    """Write a GGUF file with types from ``kinds(name, layer, layers)``, or one type for all matrices."""
    metadata = {
        "block_count": shape.layers, "context_length": shape.context, "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
    }  # fmt: skip
    numbers = {name: number for number, (name, _, _) in GGML_TYPES.items()}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    infos, at = [], 0
    for name, layer, sizes in parts(shape):
        of_matrix = kinds(name, layer, shape.layers) if callable(kinds) else kinds
        kind = of_matrix if len(sizes) == 2 else "F32"
        full = f"{name}.weight" if layer < 0 else f"blk.{layer}.{name}.weight"
        info = text(full) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *reversed(sizes))
        infos.append(info + struct.pack("<IQ", numbers[kind], at))
        at += -(-num_bytes(sizes, kind) // 32) * 32
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata) + 1)
    header += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for key, number in metadata.items():
        header += text(f"llama.{key}") + struct.pack("<II", 4, number)
    header += b"".join(infos)
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(-(-len(header) // 32) * 32 + at)
    return path


def hf_tensors(shape: Shape, kind: str = "BF16") -> Tensors:
    names = {}
    for name, layer, sizes in parts(shape):
        full = f"{_HF[name]}.weight" if layer < 0 else f"model.layers.{layer}.{_HF[name]}.weight"
        names[full] = (sizes, kind)
    return names


def awq_tensors(shape: Shape) -> Tensors:
    """4-bit weights in groups of 128, packed along their rows, as AutoAWQ stores them."""
    found: Tensors = {}
    for name, (sizes, kind) in hf_tensors(shape, "F16").items():
        if "_proj" not in name:
            found[name] = (sizes, kind)
            continue
        base, (rows, columns) = name.removesuffix("weight"), sizes
        found[base + "qweight"] = ((columns, rows // 8), "I32")
        found[base + "qzeros"] = ((columns // 128, rows // 8), "I32")
        found[base + "scales"] = ((columns // 128, rows), "F16")
    return found


def forge_hf(directory: Path, shape: Shape, tensors: Tensors, **config: Any) -> Path:
    """Write a directory in Hugging Face's layout."""
    directory.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for name, (sizes, kind) in tensors.items():
        end = at + num_bytes(sizes, kind)
        header[name] = {"dtype": kind, "shape": list(sizes), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)
    values = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate, "vocab_size": shape.vocabulary, "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.context, "tie_word_embeddings": shape.tied, **config,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(values))
    return directory
