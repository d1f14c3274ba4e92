"""Training of indexers that serve all the layers that reuse them."""
