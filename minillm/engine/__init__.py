"""The step: which sequences run, what the model says of them, what becomes of that."""
