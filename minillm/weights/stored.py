"""Read the names, shapes and types of a model's tensors from the headers of its files, without any tensor data.

`minillm.weights.checkpoint` opens the same files to read them, and checks more. This module reads only what the memory
estimate needs, and does not import torch.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.errors import WeightsError
from minillm.model.architectures import text_name
from minillm.text.reading import is_there, open_regular, read_json
from minillm.text.safe import clean_line, parse_json
from minillm.weights.accepted import ADAPTER, model_config
from minillm.weights.gguf_header import read_header
from minillm.weights.shape import Shape

_MAX_HEADER = 64 << 20  # bytes of JSON; a model of 400 billion parameters has 0.2 MB
_INDEX = "model.safetensors.index.json"

# Types of safetensors, with the bytes per value.
PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FP8_BLOCKS = "F8_E4M3 in blocks"  # FP8 with a scale per block
FP8 = {"F8_E4M3": 1, "F8_E5M2": 1, FP8_BLOCKS: 1}
# GGUF's types by number: name, values per block, bytes per block (ggml.h). The gguf package has them as well, but
# importing it is slow.
GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
BLOCKS = {name: (block, size) for name, block, size in GGML_TYPES.values()}
LOW_BIT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""GGUF types that stay as they are stored. `minillm.weights.gguf_blocks` converts them; others become int8."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: name, shape (slowest dimension first), and type (``kind``), such as BF16, Q4_K or I32."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_in_blocks(self) -> bool:
        """Return whether the tensor has one of GGUF's quantized types."""
        return self.kind in BLOCKS and self.kind not in PLAIN

    @property
    def num_bytes(self) -> int:
        """Bytes in the file. Unknown types count as 4 bytes per value."""
        if self.is_in_blocks:
            block, size = BLOCKS[self.kind]
            return -(-self.count // block) * size
        return self.count * {**PLAIN, **FP8}.get(self.kind, 4)


@dataclass(frozen=True)
class StoredModel:
    """A model's tensors, and its configuration: ``config.json``, or the shape from a GGUF file's metadata."""

    tensors: tuple[StoredTensor, ...]
    config: Mapping[str, Any] | Shape

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def read_stored(path: Path) -> StoredModel:
    """Read the headers of a model's directory or ``.gguf`` file.

    Raises:
        WeightsError: headers are missing or damaged, or claim more data than the files hold.
    """
    if not path.is_dir():
        return _of_gguf(path)
    config = model_config(path)
    return StoredModel(tuple(tensor for shard in _shards(path) for tensor in _of_safetensors(shard)), config)


def _of_gguf(path: Path) -> StoredModel:
    header = read_header(path)
    tensors = []
    for info in header.tensors.values():
        kind, block, size = GGML_TYPES.get(info.type, (f"type {info.type}", 1, 0))
        tensor = StoredTensor(info.name, info.shape, kind)
        if info.offset + tensor.count // block * size > path.stat().st_size:
            raise WeightsError(f"{path}: the file is cut short within tensor {clean_line(info.name)}")
        tensors.append(tensor)
    by_name = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" not in by_name:
        raise WeightsError(
            f"{path}: it has no tensor token_embd.weight: this is not a language model, or only a part of one"
        )
    vocabulary = by_name["token_embd.weight"].shape[0]
    shape = Shape.from_gguf(header.metadata, str(path), vocabulary, tied="output.weight" not in by_name)
    return StoredModel(tuple(tensors), shape)


def _shards(directory: Path) -> list[Path]:
    """Return the safetensors files to load: the files in the index, else ``model.safetensors``, else all files."""
    if is_there(directory / _INDEX):
        weight_map = read_json(directory / _INDEX).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) and re.fullmatch(r"[^/\0]{1,255}", name) for name in names):
            raise WeightsError(f"{directory / _INDEX}: it has no weight_map of file names")
        return [directory / name for name in sorted(set(names))]
    if is_there(directory / "model.safetensors"):
        return [directory / "model.safetensors"]
    if not (found := sorted(path for path in directory.glob("*.safetensors") if path.name != ADAPTER)):
        raise WeightsError(f"{directory} has no *.safetensors")
    return found


def _of_safetensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of one file from its header: 8 bytes with the length of a JSON object, then the object.

    Tensors for images are left out, because they are not loaded.
    """
    try:
        with open_regular(path) as stream:
            total = path.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if total < 8 or length > min(total - 8, _MAX_HEADER):
                raise ValueError("the file is cut short, or no safetensors file")
            header = parse_json(stream.read(length).decode("utf-8"))
        data_bytes = total - 8 - length
        for name, value in header.items():
            if name == "__metadata__" or (in_text := text_name(name)) is None:
                continue
            shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)) or end > data_bytes:
                raise ValueError(f"tensor {clean_line(name)} reaches beyond the file")
            tensor = StoredTensor(in_text, shape, str(value["dtype"]))
            if tensor.kind in PLAIN and tensor.num_bytes != end - begin:
                raise ValueError(f"tensor {clean_line(name)} has a size that does not match its shape")
            yield tensor
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: not usable: {clean_line(str(error))}") from None
