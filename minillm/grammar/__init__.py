"""Structured output: grammars, and the tokens that they allow at each point of a text."""
