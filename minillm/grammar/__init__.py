"""Structured output: grammars, and masks of the tokens that a grammar allows next."""
