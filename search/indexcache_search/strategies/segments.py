"""The exact dynamic program over patterns whose cost is a sum over runs of layers that share one index set."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern


def cheapest_segments(costs: NDArray[np.float64], full_layers: int, locked: Collection[int] = ()) -> Pattern:
    """The pattern with `full_layers` `F` layers whose segments, from an `F` layer to before the next, cost least.

    Ties go to the lowest layers. The recursion is the paper's Eq. 5, with costs of whole segments.

    Args:
        costs: `[N, N + 1]`, `[source, end]` of the segment of layers `source` to `end - 1`, which all use the indices
            of `source`; what stands at `end <= source` is not read.
        full_layers: `F` layers, layer 0 included.
        locked: layers that can't be `F`.

    Raises:
        SearchError: if there are fewer layers that can be `F`.
    """
    num_layers = len(costs)
    allowed = np.asarray([layer not in set(locked) for layer in range(num_layers)])
    if not 1 <= full_layers <= allowed.sum():
        raise SearchError(f"{full_layers} F layers were asked for, but only {allowed.sum()} layers have an indexer")
    later = np.arange(num_layers) > np.arange(num_layers)[:, None]
    moves = np.where(later & allowed & allowed[:, None], costs[:, :num_layers], np.inf)
    best = np.where(np.arange(num_layers) == 0, 0.0, np.inf)  # cost of all segments before the last one, by its F layer
    previous: list[NDArray[np.intp]] = []
    for _ in range(full_layers - 1):
        totals = best[:, None] + moves
        previous.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    chosen = [int((best + costs[:, num_layers]).argmin())]
    for came_from in reversed(previous):
        chosen.append(int(came_from[chosen[-1]]))
    return Pattern.from_full_layers(num_layers, chosen)
