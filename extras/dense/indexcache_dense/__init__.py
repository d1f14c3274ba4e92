"""Dense models with grouped-query attention whose layers share selections of pages (DELTA, arXiv 2510.09883)."""
