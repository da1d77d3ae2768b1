"""Full KV blocks on disk, by content: the tier below the prefix cache."""
