"""Keys of dense models as differences above thresholds (DeltaLLM), beside other plans that leave out as much."""
