"""Experiments on the core, each in a room of its own; nothing outside imports them."""
