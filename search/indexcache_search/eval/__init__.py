"""Comparison of patterns, or of servers, on data that nobody searched on."""
