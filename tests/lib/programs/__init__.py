"""Programs that tests start as processes."""
