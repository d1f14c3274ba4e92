"""Results of measurements: variants side by side, and tables of them."""
