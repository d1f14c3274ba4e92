"""The similarity baseline: an exact dynamic program over cross-layer output similarity (paper, Appendix C)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern


def similarity_pattern(similarity: NDArray[np.float64], full_layers: int, locked: Collection[int] = ()) -> Pattern:
    """The pattern with `full_layers` `F` layers whose `S` layers are most similar to the layer they reuse.

    dp[i][k] = max over j < i of dp[j][k-1] + sum of S[m, j] for m between j and i (Eq. 5); the layers after the last
    `F` are added at the end. Ties go to the lowest layers.

    Args:
        similarity: `[layers, layers]`, `[m, j]` how similar layer m's attention output stays with layer j's indices.
        full_layers: `F` layers, layer 0 included.
        locked: layers that can't be `F`.

    Raises:
        SearchError: if there are fewer layers that can be `F`.
    """
    count = similarity.shape[0]
    allowed = [layer for layer in range(count) if layer not in set(locked)]
    if not 1 <= full_layers <= len(allowed):
        raise SearchError(f"{full_layers} F layers were asked for, but only {len(allowed)} layers have an indexer")
    below = np.cumsum(similarity, axis=0)  # [m, j] = sum of S[0..m, j]

    def reuse(source: int, end: int) -> float:
        """Similarity gained by layers source+1 ... end-1 reusing `source`."""
        return float(below[end - 1, source] - below[source, source])

    best = {0: 0.0}  # by last F layer, for the current number of F layers
    previous: list[dict[int, int]] = []
    for _ in range(full_layers - 1):
        reached: dict[int, float] = {}
        came_from: dict[int, int] = {}
        for layer in allowed:
            for source in sorted(source for source in best if source < layer):
                value = best[source] + reuse(source, layer)
                if layer not in reached or value > reached[layer]:
                    reached[layer], came_from[layer] = value, source
        best = reached
        previous.append(came_from)
    last = max(best, key=lambda layer: (best[layer] + reuse(layer, count), -layer))
    chosen = [last]
    for came_from in reversed(previous):
        chosen.append(came_from[chosen[-1]])
    return Pattern.from_full_layers(count, chosen)
