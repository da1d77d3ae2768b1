"""The dimensions of a model that determine its memory, without the rest of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.storage import kv_row_bytes
from minillm.text.reading import Values

_MOST = 1 << 24  # maximum of each dimension, so that products stay far from a float's limit


@dataclass(frozen=True)
class Shape:
    """Dimensions in elements, ``context`` in tokens. ``tied``: the output head is the embedding matrix."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tied: bool = False

    @property
    def table(self) -> int:
        """Number of weights of the embedding matrix. An untied output head has the same number."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> int:
        """Number of weights of all layers' matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def vectors(self) -> int:
        """Number of weights of the norms."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def count(self) -> int:
        """Number of all weights."""
        return self.matrices + self.vectors + self.table * (1 if self.tied else 2)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Return the bytes of K and V of one token over all layers; see `kv_row_bytes`."""
        return 2 * self.layers * self.kv_heads * kv_row_bytes(self.head_dim, element_size)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str, vocabulary: int, *, tied: bool) -> Shape:
        """Read the shape from a GGUF file's metadata, for any architecture. Raises WeightsError for a bad dimension."""
        values = Values(where, metadata)
        prefix = values.text("general.architecture", "llama")

        def count(key: str, default: int | None = None) -> int:
            return values.integer(f"{prefix}.{key}", default, most=_MOST)

        heads, hidden = count("attention.head_count"), count("embedding_length")
        context = count("context_length")
        if values.number(f"{prefix}.attention.temperature_scale", 0.0):  # Ministral 3, which scales q beyond that
            context = min(context, count("rope.scaling.original_context_length", context))
        return cls(
            layers=count("block_count"),
            hidden=hidden,
            intermediate=count("feed_forward_length"),
            heads=heads,
            kv_heads=count("attention.head_count_kv", heads),
            head_dim=count("attention.key_length", max(1, hidden // heads)),
            vocabulary=vocabulary,
            context=context,
            tied=tied,
        )
