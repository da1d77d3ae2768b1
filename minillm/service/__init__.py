"""The engine in a process of its own, spoken to by messages: what the chat app talks to."""
