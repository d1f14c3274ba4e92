"""A cache whose larger part is in host memory: what has to be brought to the device, step by step."""
