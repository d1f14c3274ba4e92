"""Generated tasks that need a long context, and their tests."""
