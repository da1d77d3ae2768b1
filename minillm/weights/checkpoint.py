"""Checkpoints: models as they are stored, their tensors by Hugging Face's names.

Those of config.json and safetensors are here; those in a GGUF file are in `minillm.weights.gguf_file`.
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
from minillm.text.reading import is_there, open_regular, read_json, shown
from minillm.text.safe import clean_line
from minillm.weights.files import ModelFiles
from minillm.weights.packed import FIRST, OTHERS, Levels, fp8_matrix, fp8_planes, logical_shape, unpack
from minillm.weights.quantised import Quantised, read_quantised
from minillm.weights.stored import FP8_BLOCKS

if TYPE_CHECKING:
    from minillm.weights.gguf_file import GGUFCheckpoint

_T = TypeVar("_T")
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = frozenset(("F32", "BF16", "F16"))
_QUANTISED_DTYPES = _DTYPES | {"F8_E4M3", "I8", "I32", "I64"}


def open_checkpoint(files: ModelFiles) -> SafetensorsCheckpoint | GGUFCheckpoint:
    """Open a model's files. Raises WeightsError if they are missing, damaged or of a kind that is not supported."""
    if files.path.is_dir():
        form = read_quantised(files.path)
        return SafetensorsCheckpoint(files.path) if form is None else QuantisedCheckpoint(files.path, form)
    from minillm.weights.gguf_file import GGUFCheckpoint  # not at the top: it imports gguf

    return GGUFCheckpoint(files.path)


class SafetensorsCheckpoint:
    """A directory of weights. Tensors are read from memory-mapped files, one at a time.

    Raises WeightsError where a file is missing, damaged, outside the directory, or of a kind that is not supported.
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
            if self._where.get(name) != shard:
                raise WeightsError(f"{_INDEX} places tensor {clean_line(name)} in {shard}, and it is not there")

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._views[name].get_shape())

    def stored_as(self, name: str) -> str:
        return str(self._views[name].get_dtype())

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """One tensor, or the given rows and columns of it, which alone are read."""
        try:
            view = self._views[name]
            if len(view.get_shape()) < 2:
                return view[rows or slice(None)] if view.get_shape() else view[...]
            return view[rows or slice(None), columns or slice(None)]
        except SafetensorError as error:
            raise WeightsError(f"{self._where[name]}: {clean_line(str(error))}") from None

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """None: all tensors of these files are numbers."""
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
                raise WeightsError(f"{path}: {shown(shard)} is not a file name; shards lie beside the index")
        return weight_map

    def _find_files(self) -> list[str]:
        """The weights of a directory without an index."""
        if is_there(self._directory / "model.safetensors"):
            return ["model.safetensors"]
        if found := sorted(path.name for path in self._directory.glob("*.safetensors")):
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


class QuantisedCheckpoint(SafetensorsCheckpoint):
    """A directory of weights, matrices of which are stored in few bits; they have the names of the plain ones.

    A matrix is quantised where its packed tensors are there. Numbers of it are float32.
    """

    def __init__(self, directory: Path, form: Quantised) -> None:
        super().__init__(directory, _QUANTISED_DTYPES)
        self._form, first = form, f".{FIRST[form.method]}"
        self.config.pop("quantization_config", None)
        packed = (
            name for name, view in self._views.items() if name.endswith(first) and view.get_dtype() not in _DTYPES
        )
        self._stems = {f"{stem}.weight": stem for stem in (name.removesuffix(first) for name in packed)}
        if not self._stems:
            raise WeightsError(f"{directory}: config.json tells of {form.method} matrices, and none is there")

    def names(self) -> list[str]:
        packed = {f"{stem}.{part}" for stem in self._stems.values() for part in (*OTHERS, FIRST[self._form.method])}
        unused = (".k_scale", ".v_scale")  # of an 8-bit cache
        rest = (name for name in self._where if name not in packed and not name.endswith(unused))
        return [*self._stems, *(name for name in rest if not self._is_absent_bias(name))]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stems:
            return super().shape(name)
        asked = self._part(name, "weight_shape") if self._form.method == "packed" else None
        sizes = () if asked is None or asked.shape != (2,) or asked.is_floating_point() else tuple(map(int, asked))
        return logical_shape(self._form, super().shape(self._first(name)), sizes)

    def stored_as(self, name: str) -> str:
        if name not in self._stems:
            return super().stored_as(name)
        in_fp8 = "F8_E4M3" if self._form.block is None else FP8_BLOCKS
        return in_fp8 if self._form.method == "fp8" else f"{self._form.method} {self._form.bits}-bit"

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """One tensor, or the given rows and columns of it."""
        if name not in self._stems:
            return super().tensor(name, rows, columns)
        if self._form.method == "fp8":
            levels, scales = self._fp8(name)
            whole = levels.float() * scales
        else:
            whole = self._levels(name, torch.device("cpu")).numbers()
        return whole[rows or slice(None), columns or slice(None)].contiguous()

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> LowBit | None:
        """A matrix in few bits, or rows and columns of it; None of others, or where no kernel reads it."""
        if name not in self._stems or self._form.block is not None:
            return None
        taken, width = rows or slice(None), columns or slice(0, self.shape(name)[1])
        if self._form.method == "fp8":
            levels, scales = self._fp8(name)
            return fp8_matrix(levels[taken, width].to(device), scales[taken].to(device))
        return self._levels(name, device).low_bit(self._form.bits, taken, width)

    def _first(self, name: str) -> str:
        return f"{self._stems[name]}.{FIRST[self._form.method]}"

    def _part(self, name: str, part: str) -> Tensor | None:
        """A tensor of a packed matrix by its last name, as it is stored."""
        full = f"{self._stems[name]}.{part}"
        if full not in self._where:
            return None
        return super().tensor(full)

    def _fp8(self, name: str) -> tuple[Tensor, Tensor]:
        return self._checked(name, lambda: fp8_planes(self._form, lambda part: self._part(name, part)))

    def _levels(self, name: str, device: torch.device) -> Levels:
        def read(part: str) -> Tensor | None:
            found = self._part(name, part)
            return None if found is None else found.to(device)

        return self._checked(name, lambda: unpack(self._form, self.shape(name), read))

    def _checked(self, name: str, unpacked: Callable[[], _T]) -> _T:
        try:
            return unpacked()
        except (ValueError, RuntimeError) as error:  # torch's of shapes that do not fit
            raise WeightsError(
                f"{self._where[self._first(name)]}: {clean_line(name)}: {clean_line(str(error), 150)}"
            ) from None

    def _is_absent_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros that GPTQ writes for layers that have none."""
        if not name.endswith("_proj.bias") or self.config.get("model_type") not in ("llama", "mistral"):
            return False
        asked = self.config.get("attention_bias") or self.config.get("mlp_bias")
        return not asked and len(super().shape(name)) == 1 and not bool(super().tensor(name).any())


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name == "..":
        return False
    return name.isprintable() and len(name) <= 255 and PurePosixPath(name).name == name


def _diagnose(path: Path) -> str | None:
    """The kind of a file that is no safetensors, by its first bytes."""
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
