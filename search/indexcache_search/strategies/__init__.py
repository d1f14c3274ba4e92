"""Ways to walk pattern space."""
