"""Tensor parallelism: run one model in several processes (ranks) that work in step."""
