"""Released checkpoints of NOSA and InfLLM-V2 as plain Llama models, with their selection as a plan."""
