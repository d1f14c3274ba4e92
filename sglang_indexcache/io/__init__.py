"""The ground floor: errors, refusals, strict YAML, digests, atomic writes. It imports nothing above."""
