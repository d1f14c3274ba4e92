"""A watch over production: finished requests scored again on the served and on a reference server."""
