"""Tests against real SGLang on a CPU: the README's second environment has what they need."""
