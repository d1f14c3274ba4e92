"""The similarity baseline: an exact dynamic program over cross-layer output similarity (paper, Appendix C)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.base import too_many
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


def cheapest_segments(costs: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
    """Return the cheapest pattern with `full_layers` `F` layers, as a sum of costs of its segments.

    A segment is an `F` layer and the `S` layers after it. Ties go to the lowest layers. The recursion is the paper's
    Eq. 5 with costs of whole segments.

    Args:
        costs: `[N, N + 1]`, `[source, end]`: cost of layers `source` to `end - 1` with the indices of `source`; entries
            with `end <= source` are ignored.
        full_layers: `F` layers, layer 0 included.
        native: the checkpoint's own pattern; its `S` layers are locked.

    Raises:
        SearchError: if fewer layers can be `F`.
    """
    allowed = native.full_layers
    if not 1 <= full_layers <= len(allowed):
        raise too_many(full_layers, native)
    # ways[layer]: the cheapest way to have `layer` as the latest F layer, as (cost, F layers)
    ways: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for number in range(1, full_layers):
        ends = allowed[number : len(allowed) - full_layers + number + 1]
        ways = {layer: _extended(ways, costs, layer) for layer in ends}
    _, layers = _extended(ways, costs, len(costs))
    return native.keeping(layers[:-1])


def _extended(
    ways: dict[int, tuple[float, tuple[int, ...]]], costs: NDArray[np.float64], end: int
) -> tuple[float, tuple[int, ...]]:
    """Return the cheapest of `ways` after adding the segment from its latest `F` layer to `end`."""
    totals = {source: cost + float(costs[source, end]) for source, (cost, _) in ways.items() if source < end}
    source = min(totals, key=lambda source: (totals[source], source))
    return totals[source], (*ways[source][1], end)
