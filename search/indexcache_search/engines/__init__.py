"""Engines that evaluate patterns. `base` holds the protocol; each engine is imported only when it is used."""
