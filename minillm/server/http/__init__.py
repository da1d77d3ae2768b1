"""Access rules, limits of connections, the queue in front of the engine, metrics, and errors."""
