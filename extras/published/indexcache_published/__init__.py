"""Lists patterns that others published with what they gain; gets pattern files and folders of searches from the hub."""
