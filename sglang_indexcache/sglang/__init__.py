"""The SGLang that is installed: what it offers, hooks on it, and refusals."""
