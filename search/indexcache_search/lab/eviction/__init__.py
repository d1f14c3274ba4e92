"""Training NOSA's eviction heads."""
