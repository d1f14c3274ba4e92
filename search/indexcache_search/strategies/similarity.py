"""The similarity baseline: an exact dynamic program over cross-layer output similarity (paper, Appendix C)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.dynamic_program import cheapest_segments
from indexcache_search.strategies.measured import MeasuredStrategy
from sglang_indexcache import Pattern


def similarity_pattern(similarity: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
    """The pattern with `full_layers` `F` layers whose `S` layers are most similar to the layer they reuse (Eq. 5).

    Args:
        similarity: `[layers, layers]`, `[m, j]` how similar layer m's attention output stays with layer j's indices.
        full_layers: `F` layers, layer 0 included.
        native: the checkpoint's own pattern.

    Raises:
        SearchError: if there are fewer layers that can be `F`.
    """
    below = np.cumsum(similarity, axis=0)  # [m, j] = sum of S[0..m, j]
    costs = np.zeros((len(similarity), len(similarity) + 1))
    costs[:, 1:] = np.diag(below)[:, None] - below.T
    return cheapest_segments(costs, full_layers, native)


class Similarity(MeasuredStrategy):
    """One of the paper's baselines."""

    name = "similarity"
    summary = "no pattern, but how similar attention outputs stay (the paper's Appendix C)"
    dense = False

    def pattern(self, matrix: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
        return similarity_pattern(matrix, full_layers, native)
