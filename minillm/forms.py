"""Forms of models in files of few bits, by their usual names: for each, the bits of most matrices and of finer ones."""

# Four and eight bits in groups of 32; with k, llama.cpp's K-quants; fp8 has a scale for each row.
FORMS = {
    "q4_0": ("4", "4"), "q8_0": ("8", "8"), "q6_k": ("6k", "6k"), "q4_k_m": ("4k", "6k"), "q5_k_m": ("5k", "6k"),
    "fp8": ("fp8", "fp8"),  # layers alone
}  # fmt: skip
