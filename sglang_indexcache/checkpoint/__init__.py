"""Checkpoints that a pattern is for: their layers, whether it fits them, and the environment that reads them."""
