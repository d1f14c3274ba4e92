"""Speed of patterns and servers beside their loss, and its tests."""
