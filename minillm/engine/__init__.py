"""The step: which sequences run, and how the logits change them."""
