"""Models by name: found, fetched, checked, read."""
