"""Launch lines of SGLang, and model overrides alone: how each version reads them, and what of it ran with a pattern."""
