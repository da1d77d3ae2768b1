"""Matmuls with a weight."""
