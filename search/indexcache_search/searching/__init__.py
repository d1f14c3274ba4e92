"""Search a model for patterns: settings, the run, its files and report."""
