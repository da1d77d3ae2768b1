"""The model: its configuration, its weights and its forward pass."""
