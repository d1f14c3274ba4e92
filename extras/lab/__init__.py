"""Experiments on the core."""
