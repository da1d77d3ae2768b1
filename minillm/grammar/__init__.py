"""Structured output: what a grammar is, and which tokens it allows at each point of a text."""
