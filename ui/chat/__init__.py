"""The conversation: its data, its files, its widgets and commands."""
