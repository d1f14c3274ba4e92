"""Keys as thresholded differences to the key before (DeltaLLM, arXiv 2507.19608), and what they save, counted."""

from indexcache_lab.kernels.key_delta.naive import delta_scores, differences, kept_keys, multiply_adds

__all__ = ["delta_scores", "differences", "kept_keys", "multiply_adds"]
