"""Build an engine: read weights, size the pool, tune and compile."""
