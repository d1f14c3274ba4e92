"""What was measured: variants beside each other, and tables of them."""
