"""What others published."""
