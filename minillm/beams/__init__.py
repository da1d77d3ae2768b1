"""Beam search: a decoding method."""
