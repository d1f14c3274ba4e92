"""The installed SGLang: its features, hooks on it, and refusals."""
