"""The chat app's engine process, its client, and the messages that app and engine exchange."""
