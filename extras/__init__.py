"""What stands beside the core: each folder a package with its kernels and tests, and an extra of pyproject.toml."""
