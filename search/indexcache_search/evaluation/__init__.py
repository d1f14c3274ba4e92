"""Evaluate patterns on tokens, remember each result on disk, and judge which is best."""
