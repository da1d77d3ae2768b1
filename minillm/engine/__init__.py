"""The engine: choose the sequences of each step, run the step, and apply the drawn tokens to the sequences."""
