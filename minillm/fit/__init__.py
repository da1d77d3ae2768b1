"""Decide whether a model fits, from the headers of its files or from weights.toml. Nothing here imports torch."""
