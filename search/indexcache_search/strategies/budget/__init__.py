"""Prices of patterns: what they take of a prompt's time and of a decoding step's, by measured tables."""
