"""Folders that commands write to, and what in them is theirs: nothing of anybody else's is overwritten or deleted."""
