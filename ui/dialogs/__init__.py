"""The dialogs above the chat."""
