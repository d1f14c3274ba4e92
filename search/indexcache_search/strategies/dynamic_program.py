"""The exact dynamic program over patterns whose cost is a sum over runs of layers that share one index set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.base import too_many
from sglang_indexcache import Pattern


def cheapest_segments(costs: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
    """The pattern with `full_layers` `F` layers whose segments, from an `F` layer to before the next, cost least.

    Args: as those of `cheapest_patterns`.

    Raises:
        SearchError: if there are fewer layers that can be `F`.
    """
    [(_, pattern)] = cheapest_patterns(costs, full_layers, native, 1)
    return pattern


def cheapest_patterns(
    costs: NDArray[np.float64], full_layers: int, native: Pattern, count: int
) -> list[tuple[float, Pattern]]:
    """The `count` patterns with `full_layers` `F` layers whose segments cost least together, and what they cost.

    Ties go to the lowest layers. The recursion is the paper's Eq. 5 with costs of whole segments, and with the `count`
    best ways to get to a layer instead of the best one.

    Args:
        costs: `[N, N + 1]`, `[source, end]` of the segment of layers `source` to `end - 1`, which all use the indices
            of `source`; what stands at `end <= source` is not read, infinite is a segment that can't be.
        full_layers: `F` layers, layer 0 included.
        native: the checkpoint's own pattern; its `S` layers are locked.
        count: at most; fewer where there are no more.

    Raises:
        SearchError: if there are fewer layers that can be `F`.
    """
    num_layers = len(costs)
    allowed = native.full_layers
    if not 1 <= full_layers <= len(allowed):
        raise too_many(full_layers, native)
    # ways[layer]: the cheapest ways to have `layer` as the latest F layer, as (cost, F layers), best first
    ways: dict[int, list[tuple[float, tuple[int, ...]]]] = {0: [(0.0, (0,))]}
    for number in range(1, full_layers):
        ways = {
            layer: _extended(ways, costs, layer, count)
            for layer in allowed[number : len(allowed) - full_layers + number + 1]
        }
    return [(cost, native.keeping(layers[:-1])) for cost, layers in _extended(ways, costs, num_layers, count)]


def _extended(
    ways: dict[int, list[tuple[float, tuple[int, ...]]]], costs: NDArray[np.float64], end: int, count: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The cheapest of `ways`, with the segment from each one's latest `F` layer to `end` added."""
    before = [(source, rank) for source, items in ways.items() if source < end for rank in range(len(items))]
    totals = np.asarray([ways[source][rank][0] + costs[source, end] for source, rank in before])
    order = np.argsort(totals, kind="stable")[:count]
    extended = []
    for at in order[np.isfinite(totals[order])]:
        source, rank = before[at]
        extended.append((float(totals[at]), (*ways[source][rank][1], end)))
    return extended
