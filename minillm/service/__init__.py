"""The chat app's engine process. App and engine exchange messages."""
