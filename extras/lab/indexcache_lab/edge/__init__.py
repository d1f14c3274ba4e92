"""Decoding of a dense model over selected blocks of its cache, on a CPU."""
