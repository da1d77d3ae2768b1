"""Matmuls with quantized matrices."""
