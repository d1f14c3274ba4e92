"""Decoding with most of the cache in host memory: the traffic to the device, step by step."""
