"""Every op of the model and the sampler, on tensors alone."""
