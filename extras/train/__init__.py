"""Training of indexers for a pattern."""
