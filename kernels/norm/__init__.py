"""Ops that compute each row on its own: norms and activations."""
