"""Keys of dense models as differences above thresholds (DeltaLLM), beside what leaves out as much."""
