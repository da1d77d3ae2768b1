"""Ops of one row: norms and activations."""
