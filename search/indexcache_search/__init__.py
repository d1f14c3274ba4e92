"""Search for a cross-layer index-sharing pattern: engines, strategies, calibration data, report."""
