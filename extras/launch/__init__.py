"""Launch lines of SGLang, before it starts."""
