"""Whether a model fits: arithmetic on the headers of its files, or on weights.toml. Nothing here imports torch."""
