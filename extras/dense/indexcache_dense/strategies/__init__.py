"""Strategies for patterns of dense models."""
