"""Dense models (DELTA): which layers select pages of the cache, and which reuse the selection."""
