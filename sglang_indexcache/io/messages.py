"""Phrases of messages that several places, and many tests, share: a change of words is one edit."""

from __future__ import annotations

OTHER_LENGTH = "pattern has {} letters, model has {} layers that select"
BEGINS_SHARED = "pattern begins with S"
NO_INDEXER = "no indexer there"
NOT_COMBINED = "can't be combined with a pattern"
NOT_LOADED = "no weights were loaded into its indexer's"
WOULD_RUN = "would run as"
RAN_INDEXER = "ran an indexer"
BUSY = "requests are running"
MODEL_CHANGED = "changed since the model was read"
