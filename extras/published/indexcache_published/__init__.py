"""Patterns that others published, what they gain, and warnings about patterns that look wrong beside them."""
