"""minillm: a small, fast Llama inference framework."""
