"""Dense models in transformers: selections of pages, and what is measured of them."""
