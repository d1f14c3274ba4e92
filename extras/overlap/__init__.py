"""Index overlap of the layers on calibration servers."""
