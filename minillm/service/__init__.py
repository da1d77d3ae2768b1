"""The engine process: its messages, and the requests, pinned prefixes and chat sessions that run on the engine."""
