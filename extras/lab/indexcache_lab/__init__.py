"""Experiments on the core, each in a folder of its own; nothing outside imports them."""
