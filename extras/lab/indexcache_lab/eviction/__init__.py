"""Training of NOSA's eviction heads."""
