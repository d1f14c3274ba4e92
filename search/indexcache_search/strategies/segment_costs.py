"""A measured model of what sharing costs: how the loss rises when one segment of layers alone shares its first indices.

Segments are patterns, so any engine can measure them; and a segment's cost holds how its layers interact, which costs
of single layers do not. What is left out is how segments interact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from indexcache_search.judge import Judge
from indexcache_search.strategies.segments import cheapest_segments
from sglang_indexcache import Pattern

SegmentCosts = dict[tuple[int, int], float]
"""Increase of the loss by (source, end): layers `source` + 1 to `end` - 1 reuse the indices of `source`."""


def measure_segments(native: Pattern, bound: float, judge: Judge) -> SegmentCosts:
    """Costs of all segments that can be part of a pattern which costs less than `bound`.

    A segment grows by a layer at a time, until it alone costs more than `bound`: longer ones are left out, taking it
    that sharing does not become cheaper with one more layer in it.

    Args:
        native: the checkpoint's own pattern.
        bound: increase of the loss that a known pattern has.
        judge: evaluates on the first share of the sequences.
    """
    layers = len(native)
    costs: SegmentCosts = {(source, source + 1): 0.0 for source in native.full_layers}
    growing: Sequence[int] = native.full_layers
    for length in range(2, layers + 1):
        growing = [source for source in growing if source + length <= layers]
        patterns = [_share_all(native, source, source + length) for source in growing]
        for source, cost in zip(growing, judge.scout(patterns, native), strict=True):
            costs[source, source + length] = cost
        growing = [source for source in growing if costs[source, source + length] <= bound]
    return costs


def cheapest_pattern(costs: SegmentCosts, native: Pattern, full_layers: int) -> Pattern | None:
    """The pattern with `full_layers` `F` layers whose segments cost least together; `None` if all have one left out."""
    found = cheapest_segments(
        len(native), full_layers, lambda source, end: costs.get((source, end), math.inf), native.shared_layers
    )
    ends = [*found.full_layers[1:], len(native)]
    return found if all((source, end) in costs for source, end in zip(found.full_layers, ends, strict=True)) else None


def _share_all(native: Pattern, source: int, end: int) -> Pattern:
    full = [layer for layer in native.full_layers if not source < layer < end]
    return Pattern.from_full_layers(len(native), full)
