"""Real tasks: lm-eval runs them against servers, and their answers are compared document by document."""
