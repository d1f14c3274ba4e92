"""Lists patterns that others published, and finds files and folders on the hub; see README.md."""
