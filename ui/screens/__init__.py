"""The chat, and what opens above it."""
