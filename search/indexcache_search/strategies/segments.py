"""The exact dynamic program over patterns whose cost is a sum over runs of layers that share one index set."""

from __future__ import annotations

from collections.abc import Callable, Collection

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern


def cheapest_segments(
    num_layers: int, full_layers: int, cost: Callable[[int, int], float], locked: Collection[int] = ()
) -> Pattern:
    """The pattern with `full_layers` `F` layers whose segments, from an `F` layer to before the next, cost least.

    Ties go to the lowest layers. The recursion is the paper's Eq. 5, with costs of whole segments.

    Args:
        num_layers: N.
        full_layers: `F` layers, layer 0 included.
        cost: of the segment of layers `source` to `end - 1`, which all use the indices of `source`.
        locked: layers that can't be `F`.

    Raises:
        SearchError: if there are fewer layers that can be `F`.
    """
    allowed = [layer for layer in range(num_layers) if layer not in set(locked)]
    if not 1 <= full_layers <= len(allowed):
        raise SearchError(f"{full_layers} F layers were asked for, but only {len(allowed)} layers have an indexer")
    best = {0: 0.0}  # cost of all segments before one, by its F layer
    previous: list[dict[int, int]] = []
    for _ in range(full_layers - 1):
        reached: dict[int, float] = {}
        came_from: dict[int, int] = {}
        for layer in allowed:
            for source in sorted(source for source in best if source < layer):
                value = best[source] + cost(source, layer)
                if layer not in reached or value < reached[layer]:
                    reached[layer], came_from[layer] = value, source
        best = reached
        previous.append(came_from)
    last = min(best, key=lambda layer: (best[layer] + cost(layer, num_layers), layer))
    chosen = [last]
    for came_from in reversed(previous):
        chosen.append(came_from[chosen[-1]])
    return Pattern.from_full_layers(num_layers, chosen)
