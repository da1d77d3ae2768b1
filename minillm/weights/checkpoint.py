"""Checkpoints: models in files, with tensors under Hugging Face's names.

This module reads config.json and safetensors; `minillm.weights.gguf_file` reads GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.errors import WeightsError
from minillm.kernels import LowBit
from minillm.model.loader import HEAD, IGNORED_SUFFIXES
from minillm.text.reading import is_there, open_regular, read_json, shown
from minillm.text.safe import clean_line
from minillm.weights.accepted import ADAPTER, read_config
from minillm.weights.files import ModelFiles
from minillm.weights.packed import FIRST, OTHERS, Levels, fp8_matrix, fp8_planes, recognized, unpack
from minillm.weights.quantized import Quantization, Quantized, read_quantized
from minillm.weights.stored import FP8_BLOCKS

if TYPE_CHECKING:
    from minillm.weights.gguf_file import GGUFCheckpoint

_T = TypeVar("_T")
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = frozenset(("F32", "BF16", "F16"))
_QUANTIZED_DTYPES = _DTYPES | {"F8_E4M3", "I8", "I32", "I64"}


def open_checkpoint(files: ModelFiles) -> SafetensorsCheckpoint | GGUFCheckpoint:
    """Open a model's files. Raises WeightsError if they are missing, damaged or of an unsupported kind."""
    if files.path.is_dir():
        read_config(files.path)  # first: an unsupported architecture explains more than an unknown tensor
        found = read_quantized(files.path)
        return SafetensorsCheckpoint(files.path) if found is None else QuantizedCheckpoint(files.path, found)
    from minillm.weights.gguf_file import GGUFCheckpoint  # not at the top: it imports gguf

    return GGUFCheckpoint(files.path)


class SafetensorsCheckpoint:
    """A directory of safetensors. Tensors are read from memory-mapped files, one at a time.

    Opening it raises WeightsError if a file is missing, damaged, outside the directory, or of an unsupported kind.
    """

    def __init__(self, directory: Path, dtypes: frozenset[str] = _DTYPES) -> None:
        self._directory, self._dtypes = directory, dtypes
        self.config: dict[str, Any] = read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if is_there(generation) else {}
        self.tokenizer_source = directory
        self._views: dict[str, Any] = {}
        self._where: dict[str, str] = {}  # tensor -> shard
        expected = self._read_index()
        for shard in sorted(set(expected.values())) if expected else self._find_files():
            self._open(shard)
        for name, shard in expected.items():
            # Indices often name tensors that are not stored: a tied head, and buffers that the loader ignores.
            if self._where.get(name) != shard and not name.endswith((HEAD, *IGNORED_SUFFIXES)):
                raise WeightsError(f"{_INDEX} places tensor {clean_line(name)} in {shard}, but it is not there")

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._views[name].get_shape())

    def stored_as(self, name: str) -> str:
        return str(self._views[name].get_dtype())

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Read one tensor, or only some of its rows and columns."""
        try:
            view = self._views[name]
            if len(view.get_shape()) < 2:
                return view[rows or slice(None)] if view.get_shape() else view[...]
            return view[rows or slice(None), columns or slice(None)]
        except SafetensorError as error:
            raise WeightsError(f"{self._where[name]}: {clean_line(str(error))}") from None

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """Return None: these files have no low-bit tensors."""
        return None

    def _read_index(self) -> dict[str, str]:
        path = self._directory / _INDEX
        if not is_there(path):
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{path}: it has no weight_map")
        for shard in weight_map.values():
            if not _is_file_name(shard):
                raise WeightsError(
                    f"{path}: {shown(shard)} is not a file name; shards must be in the directory of the index"
                )
        return weight_map

    def _find_files(self) -> list[str]:
        """Return the weight files of a directory without an index."""
        if is_there(self._directory / "model.safetensors"):
            return ["model.safetensors"]
        names = (path.name for path in self._directory.glob("*.safetensors"))
        if found := sorted(name for name in names if name != ADAPTER):
            return found
        if any(next(self._directory.glob(pattern), None) for pattern in _PICKLED):
            raise WeightsError(
                f"{self._directory} has pickled weights only, which can run code when they are opened; "
                "minillm never does: convert them to safetensors (transformers' save_pretrained writes them)"
            )
        raise WeightsError(f"{self._directory} has no *.safetensors")

    def _open(self, shard: str) -> None:
        path = self._directory / shard
        if not is_there(path):
            raise WeightsError(f"{path} is missing: the model is incomplete")
        try:
            open_regular(path).close()
            handle = safe_open(path, framework="pt")
            views = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"{path}: {_diagnose(path) or clean_line(str(error))}") from None
        for name, view in views.items():
            if name in self._where:
                raise WeightsError(f"tensor {clean_line(name)} is both in {self._where[name]} and in {shard}")
            if view.get_dtype() not in self._dtypes:
                known = ", ".join(sorted(self._dtypes))
                raise WeightsError(f"{path}: tensor {clean_line(name)} is {view.get_dtype()}; supported: {known}")
            self._where[name], self._views[name] = shard, view


class QuantizedCheckpoint(SafetensorsCheckpoint):
    """A directory of safetensors with quantized matrices.

    A quantized matrix consists of several stored tensors, such as ``q_proj.qweight`` and ``q_proj.scales``. Their
    shapes determine its format. The matrix is read under its unquantized name, ``q_proj.weight``.
    """

    def __init__(self, directory: Path, quantization: Quantization) -> None:
        super().__init__(directory, _QUANTIZED_DTYPES)
        self._quantization = quantization
        self.config.pop("quantization_config", None)
        # "….q_proj" -> the last components of its stored tensors' names, such as "qweight" and "scales"
        self._parts: dict[str, list[str]] = {}
        for name in self._where:
            stem, _, part = name.rpartition(".")
            self._parts.setdefault(stem, []).append(part)
        self._stems = {f"{stem}.weight": stem for stem in self._parts if self._first(stem)}
        if not self._stems:
            raise WeightsError(f"{directory}: config.json announces {quantization.method} matrices, but it has none")
        self._forms: dict[str, tuple[Quantized, tuple[int, ...]]] = {}

    def names(self) -> list[str]:
        packed = {f"{stem}.{part}" for stem in self._stems.values() for part in (*OTHERS, *FIRST.values())}
        unused = (".k_scale", ".v_scale")  # scales for an 8-bit KV cache
        rest = (name for name in self._where if name not in packed and not name.endswith(unused))
        return [*self._stems, *(name for name in rest if not self._is_absent_bias(name))]

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(name) if name not in self._stems else self._form(name)[1]

    def stored_as(self, name: str) -> str:
        if name not in self._stems:
            return super().stored_as(name)
        form, _ = self._form(name)
        in_fp8 = "F8_E4M3" if form.block is None else FP8_BLOCKS
        return in_fp8 if form.method == "fp8" else f"{form.method} {form.bits}-bit"

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Read one tensor, or only some of its rows and columns. A quantized matrix is dequantized to float32."""
        if name not in self._stems:
            return super().tensor(name, rows, columns)
        if self._form(name)[0].method == "fp8":
            levels, scales = self._fp8(name)
            whole = levels.float() * scales
        else:
            whole = self._levels(name, torch.device("cpu")).numbers()
        return whole[rows or slice(None), columns or slice(None)].contiguous()

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """Return a quantized matrix, or some of its rows and columns, still quantized and in the kernels' layout.

        Return None if the tensor is not quantized, or if no kernel reads its format.
        """
        if name not in self._stems:
            return None
        form, shape = self._form(name)
        taken, width = rows or slice(None), columns or slice(0, shape[1])
        if form.block is not None:
            return None
        if form.method == "fp8":
            levels, scales = self._fp8(name)
            return fp8_matrix(levels[taken, width].to(device), scales[taken].to(device))
        return self._levels(name, device).low_bit(form.bits, taken, width)

    def _first(self, stem: str) -> str | None:
        """Return the name of the stored tensor that has the levels (integers or FP8 numbers) of a quantized matrix.

        ``stem`` is the matrix's name without ``.weight``. Return None if the matrix is not quantized.
        """
        for part in ("qweight", "weight_packed", "weight"):
            name = f"{stem}.{part}"
            if part in self._parts[stem] and self._views[name].get_dtype() not in _DTYPES:
                return name
        return None

    def _form(self, name: str) -> tuple[Quantized, tuple[int, ...]]:
        """Return a matrix's storage format and its shape."""
        if name not in self._forms:
            stem, super_shape = self._stems[name], super().shape
            shapes = {part: super_shape(f"{stem}.{part}") for part in self._parts[stem]}
            in_fp8 = "weight" in shapes and super().stored_as(f"{stem}.weight") == "F8_E4M3"
            asked = self._part(name, "weight_shape")
            sizes = () if asked is None or asked.shape != (2,) or asked.is_floating_point() else tuple(map(int, asked))
            self._forms[name] = self._checked(name, lambda: recognized(self._quantization, shapes, in_fp8, sizes))
        return self._forms[name]

    def _part(self, name: str, part: str) -> Tensor | None:
        """Read one of a quantized matrix's stored tensors, or return None if the checkpoint does not have it.

        ``part`` is the last component of the stored tensor's name, such as "scales".
        """
        full = f"{self._stems[name]}.{part}"
        if full not in self._where:
            return None
        return super().tensor(full)

    def _fp8(self, name: str) -> tuple[Tensor, Tensor]:
        return self._checked(name, lambda: fp8_planes(self._form(name)[0], lambda part: self._part(name, part)))

    def _levels(self, name: str, device: torch.device) -> Levels:
        def read(part: str) -> Tensor | None:
            found = self._part(name, part)
            return None if found is None else found.to(device)

        return self._checked(name, lambda: unpack(*self._form(name), read))

    def _checked(self, name: str, unpacked: Callable[[], _T]) -> _T:
        try:
            return unpacked()
        except (ValueError, RuntimeError) as error:  # torch raises RuntimeError for shapes that do not fit
            shard = self._where[self._first(self._stems[name]) or name]
            raise WeightsError(f"{shard}: {clean_line(name)}: {clean_line(str(error), 150)}") from None

    def _is_absent_bias(self, name: str) -> bool:
        """Return whether a tensor is an all-zero bias, which GPTQ writes for layers that have no bias."""
        if not name.endswith("_proj.bias") or self.config.get("model_type") not in ("llama", "mistral"):
            return False
        asked = self.config.get("attention_bias") or self.config.get("mlp_bias")
        return not asked and len(super().shape(name)) == 1 and not bool(super().tensor(name).any())


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name == "..":
        return False
    return name.isprintable() and len(name) <= 255 and PurePosixPath(name).name == name


def _diagnose(path: Path) -> str | None:
    """Guess the kind of a file that is not safetensors, from its first bytes."""
    try:
        with open_regular(path) as stream:
            start = stream.read(256)
    except OSError as error:
        return error.strerror
    if not start:
        return "the file is empty"
    if start.startswith(b"version https://git-lfs"):
        return "this is a git-lfs pointer, not the weights; fetch them with `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "this is a web page, not weights; download the file again"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")) and start[8:9] != b"{":
        return "this is a pickled checkpoint under another name; it is not opened"
    cut_short = int.from_bytes(start[:8], "little") + 8 > path.stat().st_size
    return "the file is cut short; download it again" if cut_short else None
