"""A measured model of what sharing costs: how the loss rises when one segment of layers alone shares its first indices.

Segments are patterns, so any engine can measure them; and a segment's cost holds how its layers interact, which costs
of single layers do not. What is left out is how segments interact.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from indexcache_search.judge import Judge
from indexcache_search.strategies.segments import cheapest_segments
from sglang_indexcache import Pattern

Segment = tuple[int, int]
"""(source, end): layers `source` + 1 to `end` - 1 reuse the indices of `source`."""


class SegmentCosts:
    """Finds the pattern whose segments cost least, and measures no more of them than that takes.

    First every layer is shared alone, on the first share of the sequences. A segment that was not measured is taken to
    cost what its longest measured beginning does and its other layers alone: reuse from further away rarely costs less,
    so this errs on the low side, and what the dynamic program chooses by mistake gets measured. It runs again until
    every segment of its pattern was measured on at least half of the sequences, beginning with the first share.

    Args:
        native: the checkpoint's own pattern.
        judge: evaluates on growing shares of the sequences.
    """

    def __init__(self, native: Pattern, judge: Judge) -> None:
        self._native, self._judge = native, judge
        self._heads = [*native.full_layers, len(native)]  # where a segment can begin or end
        self._enough = max(0, len(judge.shares) - 2)
        self._costs: dict[Segment, float] = {}
        self._shares: dict[Segment, int] = {}  # which share a cost was measured on
        if len(self._heads) > 2:
            self._measure([(before, after) for before, _, after in self._triples()])

    def __len__(self) -> int:
        return len(self._costs)

    def cheapest(self, full_layers: int) -> Pattern:
        """The pattern with `full_layers` `F` layers whose segments cost least together.

        Raises:
            SearchError: if there are fewer layers that can be `F`.
        """
        while True:
            pattern = cheapest_segments(self.estimates(), full_layers, self._native.shared_layers)
            ends = [*pattern.full_layers[1:], len(pattern)]
            segments = [item for item in zip(pattern.full_layers, ends, strict=True) if item not in self._unshared()]
            rough = [item for item in segments if self._shares.get(item, -1) < self._enough]
            if not rough:
                return pattern
            least = min(self._shares.get(item, -1) for item in rough)
            self._measure([item for item in rough if self._shares.get(item, -1) == least])

    def estimates(self) -> NDArray[np.float64]:
        """`[N, N + 1]`, what each segment costs as far as that is known; infinite where a segment can't be."""
        costs = np.full((len(self._native), len(self._native) + 1), np.inf)
        alone = {layer: max(0.0, self._costs[before, after]) for before, layer, after in self._triples()}
        for number, source in enumerate(self._heads[:-1]):
            value = 0.0
            for before, end in itertools.pairwise(self._heads[number:]):
                if (source, end) in self._costs:
                    value = self._costs[source, end]
                elif before != source:
                    value = max(0.0, value) + alone[before]
                costs[source, end] = value
        return costs

    def _measure(self, segments: list[Segment]) -> None:
        """Measure segments on the share after the one they were measured on, which is the same for all."""
        share = self._shares.get(segments[0], -1) + 1
        patterns = [
            Pattern.from_full_layers(
                len(self._native), [layer for layer in self._heads[:-1] if not source < layer < end]
            )
            for source, end in segments
        ]
        self._costs |= dict(zip(segments, self._judge.scout(patterns, self._native, share), strict=True))
        self._shares |= dict.fromkeys(segments, share)

    def _triples(self) -> list[tuple[int, int, int]]:
        """Each layer that can change to `S`, between the `F` layer before it and the one after, or the end."""
        return list(zip(self._heads, self._heads[1:], self._heads[2:], strict=False))

    def _unshared(self) -> set[Segment]:
        """Segments that the native pattern has already; they cost nothing."""
        return set(itertools.pairwise(self._heads))
