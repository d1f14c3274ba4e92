"""What others published: patterns with what they gain, and pattern files and folders of searches on the hub."""
