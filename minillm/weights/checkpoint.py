"""A checkpoint of either kind: a model as it is stored, its tensors by their Hugging Face names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minillm.weights.files import ModelFiles
from minillm.weights.safetensors_file import SafetensorsCheckpoint

if TYPE_CHECKING:
    from minillm.weights.gguf_file import GGUFCheckpoint


def open_checkpoint(files: ModelFiles) -> SafetensorsCheckpoint | GGUFCheckpoint:
    """Open a model's files.

    Raises:
        WeightsError: they are missing, damaged or of a kind that is not supported.
    """
    if files.path.is_dir():
        return SafetensorsCheckpoint(files.path)
    from minillm.weights.gguf_file import GGUFCheckpoint  # not at the top: it imports gguf

    return GGUFCheckpoint(files.path)
