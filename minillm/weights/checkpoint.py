"""Checkpoints: models as they are stored, their tensors by Hugging Face's names.

Those of config.json and safetensors are here; those in a GGUF file are in `minillm.weights.gguf_file`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.errors import WeightsError
from minillm.kernels import LowBit
from minillm.text.reading import is_there, open_regular, read_json, shown
from minillm.text.safe import clean_line
from minillm.weights.files import ModelFiles

if TYPE_CHECKING:
    from minillm.weights.gguf_file import GGUFCheckpoint

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"F32", "BF16", "F16"}


def open_checkpoint(files: ModelFiles) -> SafetensorsCheckpoint | GGUFCheckpoint:
    """Open a model's files. Raises WeightsError if they are missing, damaged or of a kind that is not supported."""
    if files.path.is_dir():
        return SafetensorsCheckpoint(files.path)
    from minillm.weights.gguf_file import GGUFCheckpoint  # not at the top: it imports gguf

    return GGUFCheckpoint(files.path)


class SafetensorsCheckpoint:
    """A directory of weights. Tensors are read from memory-mapped files, one at a time.

    Raises WeightsError where a file is missing, damaged, outside the directory, or of a kind that is not supported.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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
            if len(view.get_shape()) == 1:
                return view[rows or slice(None)]
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
            if view.get_dtype() not in _DTYPES:
                raise WeightsError(
                    f"{path}: tensor {clean_line(name)} is {view.get_dtype()}; supported: {', '.join(sorted(_DTYPES))}"
                )
            self._where[name], self._views[name] = shard, view


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
