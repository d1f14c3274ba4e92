"""The loss of indexers in other trainers."""
