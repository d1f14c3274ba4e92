"""How long a search takes: an estimate from its first minute, and the time left while it runs."""
