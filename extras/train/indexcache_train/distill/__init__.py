"""Training-aware IndexCache (paper, Section 3.2): indexers that learn to serve all the layers that reuse them."""
