"""How long a search takes, and its tests."""
