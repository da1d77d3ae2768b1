"""Text to token ids and back, and text of strangers made harmless."""
