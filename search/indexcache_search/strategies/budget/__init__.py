"""Times of patterns, for prefill and for a decoding step, by latency tables."""
