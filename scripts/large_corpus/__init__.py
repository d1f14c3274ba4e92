"""A corpus of 150 million tokens and more, from what package archives carry."""
