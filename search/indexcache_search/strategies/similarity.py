"""The similarity baseline: an exact dynamic program over cross-layer output similarity (paper, Appendix C)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.dynamic_program import cheapest_segments
from indexcache_search.strategies.measured import MeasuredStrategy
from sglang_indexcache import Pattern


def similarity_pattern(similarity: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
    """Return the pattern whose `S` layers are most similar to the `full_layers` `F` layers they reuse (Eq. 5).

    Args:
        similarity: `[layers, layers]`, `[m, j]`: similarity of layer m's attention output with layer j's indices.
        full_layers: number of `F` layers, layer 0 included.
        native: the checkpoint's own pattern.

    Raises:
        SearchError: if fewer layers can be `F`.
    """
    below = np.cumsum(similarity, axis=0)  # [m, j] = sum of S[0..m, j]
    costs = np.zeros((len(similarity), len(similarity) + 1))
    costs[:, 1:] = np.diag(below)[:, None] - below.T
    return cheapest_segments(costs, full_layers, native)


class Similarity(MeasuredStrategy):
    """Similarity baseline of the paper."""

    name = "similarity"
    summary = "no pattern, but how similar attention outputs stay (the paper's Appendix C)"
    dense = False

    def pattern(self, matrix: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
        """Derive a pattern by `similarity_pattern`."""
        return similarity_pattern(matrix, full_layers, native)
