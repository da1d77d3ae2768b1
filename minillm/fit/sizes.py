"""Compare a model's quantizations: the memory of each, and which is best."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from minillm.errors import WeightsError
from minillm.fit.budget import Budget, Fit
from minillm.fit.weights import (
    PACKED,
    QUANTIZED,
    Layout,
    Weights,
    expected_by_bits,
    expected_tensors,
    is_plain_matrix,
    weights_in_memory,
)
from minillm.model.config import ModelConfig
from minillm.weights.files import find_downloaded
from minillm.weights.manifest import ModelEntry, PathSource
from minillm.weights.shape import Shape
from minillm.weights.stored import StoredModel, StoredTensor, read_stored

READING_SPEED = 10.0  # tokens per second


@dataclass(frozen=True)
class SizedModel:
    """A model and the sizes of its tensors. The sizes are read from its files, or estimated from its shape.

    ``size`` is the size of the model's files in bytes. ``downloaded``: the files are on this machine.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    shape: Shape
    size: int
    downloaded: bool = False
    quantize: str = ""  # value of the option --quantize, which quantizes matrices during loading; empty: not set
    kept: str = ""  # value of the option --weights, the storage of matrices in memory; empty: not set

    def fit(self, budget: Budget) -> Fit:
        """Return how the model fits on a device."""
        return budget.fit(self.weights(budget), self.shape)

    @property
    def options(self) -> str:
        """The command-line option that sets ``quantize`` or ``kept``, such as " --quantize int8". It may be empty."""
        return f" --quantize {self.quantize}" if self.quantize else f" --weights {self.kept}" if self.kept else ""

    @property
    def command(self) -> str:
        """The command that starts a chat with the model and `options`."""
        return f"minillm chat --model {shlex.quote(self.name)}{self.options}"

    def layout(self, budget: Budget) -> Layout:
        """Return how the engine stores the model's weights in memory."""
        return self.decided(budget).layout(self.quantize)

    def decided(self, budget: Budget) -> Budget:
        """Return the budget with the value of the option ``weights`` that applies to this model.

        This matters for "auto" on a CPU: a low-bit model is dequantized if the result takes at most half of the free
        memory. Otherwise the model stays low-bit.
        """
        if self.kept:
            return budget.with_weights(self.kept)
        if not budget.chooses_weights:
            return budget
        whole = replace(budget, config=replace(budget.config, tensor_parallel_size=1))  # ranks share a CPU's memory
        expanded, stored = (replace(self, kept=kept).weights(whole).memory for kept in ("expanded", "stored"))
        return budget.with_weights("stored" if stored < expanded > budget.most_dequantized else "expanded")

    def weights(self, budget: Budget) -> Weights:
        """Return the sizes of the model's weights. With tensor parallelism, they are those of one rank's part."""
        part, layout, tensors = 1 / budget.config.tensor_parallel_size, self.layout(budget), self.tensors
        if any(tensor.name == PACKED for tensor in tensors):
            if layout.storage in ("int8", "int4"):  # 8-bit or 4-bit matmuls
                tensors = expected_by_bits(self.shape, self.size)
            elif layout.storage == "expanded":  # float32
                tensors = expected_tensors(self.shape, sys.maxsize)
        return weights_in_memory(tensors, layout, lambda tensor: part)


def shape_of(config: ModelConfig) -> Shape:
    """Return the shape of a validated configuration."""
    return Shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        context=config.longest_context,
        tied=config.tie_word_embeddings,
    )


def sized(name: str, path: Path, downloaded: bool = False) -> SizedModel:
    """Read the model in a directory or a ``.gguf`` file. Raises WeightsError if its headers are damaged or missing."""
    stored = read_stored(path)
    return SizedModel(name, stored.tensors, _shape(stored), stored.num_bytes, downloaded)


def sized_entry(entry: ModelEntry) -> SizedModel | None:
    """Return a model of weights.toml with the sizes of its tensors.

    The sizes are read from the model's files if these are on this machine. Otherwise they are estimated from the shape
    in weights.toml. Return None if the shape or the size is unknown.
    """
    files = find_downloaded(entry.name)
    paths = [Path(source.path) for source in entry.sources if isinstance(source, PathSource)]
    path = next(filter(Path.exists, paths), None) if files is None else files.path
    if path is not None:
        try:
            return sized(entry.name, path, downloaded=True)
        except WeightsError:  # loading it reports the error
            pass
    if entry.shape is None or not entry.size:
        return None
    return SizedModel(entry.name, expected_tensors(entry.shape, entry.size), entry.shape, entry.size, path is not None)


def sized_versions(entry: ModelEntry) -> list[SizedModel]:
    """Return all quantizations of a model of weights.toml that have a known size."""
    return [found for form in entry.all_forms() if (found := sized_entry(form)) is not None]


def quantized(model: SizedModel) -> list[SizedModel]:
    """Return copies of the model: one for each quantization that ``--quantize`` can apply during loading.

    The list is empty if the model has no matrices of 16 or 32 bits.
    """
    plain = any(is_plain_matrix(tensor) for tensor in model.tensors)
    return [replace(model, quantize=kind) for kind in QUANTIZED] if plain else []


def in_low_bits(model: SizedModel, budget: Budget) -> list[SizedModel]:
    """Return a copy of the model with an option ``--weights`` that saves memory on a CPU, as a list with one element.

    The option is "stored" (low-bit weights stay as stored) if this saves memory, otherwise "int8" (all weights in 8
    bits). The list is empty on a GPU, and if neither option saves memory.
    """
    if budget.on_gpu:
        return []
    before = model.weights(budget).memory
    ways = (replace(model, kept=kept) for kept in ("stored", "int8"))
    return [way for way in ways if way.weights(budget).memory < before][:1]


def ranked(
    models: Iterable[SizedModel], budget: Budget, bandwidth: float | None = None
) -> list[tuple[SizedModel, Fit]]:
    """Return the models that fit, best first.

    The order has three groups:
    - models that reach `READING_SPEED` and have memory for a conversation. Models with larger files come first. If the
      files are equal, the model that takes more memory comes first. Without a ``bandwidth`` (bytes per second), every
      model counts as fast enough.
    - slower models with memory for a conversation, the fastest first.
    - models without memory for a conversation, the longest context first.
    """
    found = [(model, fit) for model in models if (fit := model.fit(budget)).fits]

    def rank_key(each: tuple[SizedModel, Fit]) -> tuple[int, float, int]:
        model, fit = each
        speed = READING_SPEED if bandwidth is None else budget.tokens_per_second(fit, model.shape, bandwidth)
        if not fit.fits_conversation:
            return 0, fit.context, 0
        return (2, model.size, fit.weights.memory) if speed >= READING_SPEED else (1, speed, 0)

    return sorted(found, key=rank_key, reverse=True)


def _shape(stored: StoredModel) -> Shape:
    if isinstance(stored.config, Shape):
        return stored.config
    # The sizes of quantized weights come from the stored tensors, so the shape does not need quantization_config.
    config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
    return shape_of(ModelConfig.from_hf(config))
