"""The conversation: its screen, its data, its messages."""
