"""Folders that commands write to. A command never overwrites or deletes files that it did not write."""
