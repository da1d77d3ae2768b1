"""Models by name: find, download, verify and read them."""
