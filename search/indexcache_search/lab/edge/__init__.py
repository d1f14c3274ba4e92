"""Decoding a dense model over chosen blocks of its cache, on a CPU."""
