"""Number formats: of quantized models, of matrices in memory, and of the KV cache."""

from typing import Literal

# By their usual names, the bits of most matrices and of finer ones. Four and eight bits in groups of 32; with k,
# llama.cpp's K-quants; fp8 has a scale for each row.
FORMS = {
    "q4_0": ("4", "4"), "q8_0": ("8", "8"), "q6_k": ("6k", "6k"), "q4_k_m": ("4k", "6k"), "q5_k_m": ("5k", "6k"),
    "fp8": ("fp8", "fp8"),  # layers alone
}  # fmt: skip

# How matrices are held: quantized ones as they are stored, or all in the engine's dtype. On a CPU: all in 8 bits (4-bit
# ones in 4 bits as well), or only quantized ones: 4-bit ones in 4 bits, others in 8.
Held = Literal["stored", "expanded", "int8", "int4"]


def kv_row_bytes(head_dim: int, element_size: int) -> int:
    """Return the bytes of a token's K or V in one head, with a scale of 4 bytes if ``element_size`` is 1."""
    return head_dim * element_size + (4 if element_size == 1 else 0)
