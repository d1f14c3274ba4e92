"""A watch over production."""
