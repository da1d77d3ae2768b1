"""Execute a schedule: build the model's input tensors, compute logits, and draw tokens from them."""
