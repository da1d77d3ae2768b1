"""Number formats: of quantized models, of matrices in memory, and of the KV cache."""

from typing import Literal

# Quantizations by their usual names: the formats of most matrices, and of the matrices that get more bits. "4" and "8"
# are bits in groups of 32 weights; with k, the formats are llama.cpp's K-quants; fp8 has a scale for each row.
QUANTIZATIONS = {
    "q4_0": ("4", "4"), "q8_0": ("8", "8"), "q6_k": ("6k", "6k"), "q4_k_m": ("4k", "6k"), "q5_k_m": ("5k", "6k"),
    "fp8": ("fp8", "fp8"),  # of the layers only
}  # fmt: skip

# The storage of matrices in memory. stored: quantized matrices as in the file. expanded: all in the engine's dtype. On
# a CPU, int8: all in 8 bits (4-bit ones also in 4); int4: 4-bit matrices in 4 bits, other quantized ones in 8 bits.
Storage = Literal["stored", "expanded", "int8", "int4"]


def kv_row_bytes(head_dim: int, element_size: int) -> int:
    """Return the bytes of one token's K or V in one head. If ``element_size`` is 1, add the 4 bytes of a scale."""
    return head_dim * element_size + (4 if element_size == 1 else 0)
