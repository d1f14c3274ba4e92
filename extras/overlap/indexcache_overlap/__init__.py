"""Index overlap of the layers on calibration servers: how alike their selections are."""
