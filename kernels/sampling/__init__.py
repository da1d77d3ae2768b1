"""Ops that draw tokens from logits."""
