"""The memory panel: the engine's block pool as data, and six views of it."""
