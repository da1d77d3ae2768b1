"""The conversation in the chat app: its data, its files, its widgets and its commands."""
