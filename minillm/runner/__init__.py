"""Execute a schedule: tensors for the model, its logits, and tokens drawn from them."""
