"""Text to token ids and back, and filters for untrusted text."""
