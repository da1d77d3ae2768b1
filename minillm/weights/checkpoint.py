"""A checkpoint of either kind behind one face: tensors by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from minillm.weights.files import ModelFiles


class Checkpoint(Protocol):
    """A model's weights, configuration and tokenizer, as they are stored."""

    config: dict[str, Any]  # as in config.json
    generation_config: dict[str, Any]

    @property
    def tokenizer_source(self) -> Path | Mapping[str, Any]:
        """A directory with tokenizer.json, or the metadata of a GGUF file."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def stored_as(self, name: str) -> str: ...  # BF16, Q4_K
    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor: ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open a model's files.

    Raises:
        WeightsError: they are missing, damaged or of a kind that is not supported.
    """
    if files.path.is_dir():
        from minillm.weights.safetensors_file import SafetensorsCheckpoint

        return SafetensorsCheckpoint(files.path)
    from minillm.weights.gguf_file import GGUFCheckpoint

    return GGUFCheckpoint(files.path)
