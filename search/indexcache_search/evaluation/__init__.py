"""Evaluate patterns on tokens, record each result on disk, and compare patterns."""
