"""Pages and pictures of results, and their tests."""
