"""Speculative decoding: draft tokens, by lookup or a draft model, and their acceptance."""
