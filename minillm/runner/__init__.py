"""From a schedule to tensors to logits to drawn tokens."""
