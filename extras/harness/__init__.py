"""Real tasks, which lm-eval runs against servers."""
