"""Files of this project and how they are read: pattern files, strict YAML, digests, atomic writes."""
