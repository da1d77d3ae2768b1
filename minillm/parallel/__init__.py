"""Run a model over several processes, and a file of prompts over several models."""
