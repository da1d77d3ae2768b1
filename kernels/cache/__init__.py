"""Ops that write and copy the KV cache."""
