"""How the embedded demo model was made: corpus, recall tasks, training."""
