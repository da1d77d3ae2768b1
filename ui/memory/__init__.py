"""The memory view: the engine's pool of blocks as data, and its pictures."""
