"""The engine in a process of its own. The chat app talks to it by messages."""
