"""Patterns that others published."""
