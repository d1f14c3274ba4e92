"""A model before it is loaded: its files, its config.json, its layers."""
