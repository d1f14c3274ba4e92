"""Pattern files: their content, where they come from, and the published ones that this package carries."""
