"""A measured model of what sharing costs: how the loss rises when one segment of layers alone shares its first indices.

Segments are patterns, so any engine can measure them; and a segment's cost holds how its layers interact, which costs
of single layers do not. What is left out is how segments interact.
"""

from __future__ import annotations

import itertools
from statistics import median

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
    every segment of its pattern was measured on half of the sequences, by way of the smaller shares. Then the pattern
    itself runs on all of them. Where it costs more than its segments together, by more than the standard error, it was
    chosen for what half of the sequences did not show: its segments are measured on all, and so on. Other costs are
    then taken to rise as these did in the median, or the search would go from one lucky segment to the next.

    Args:
        native: the checkpoint's own pattern.
        judge: evaluates on growing shares of the sequences.
    """

    def __init__(self, native: Pattern, judge: Judge) -> None:
        self._native, self._judge, self._everything = native, judge, len(judge.shares) - 1
        self._heads = [*native.full_layers, len(native)]  # where a segment can begin or end
        self._unshared = set(itertools.pairwise(self._heads))  # segments of the native pattern; they cost nothing
        self._costs: dict[Segment, float] = {}
        self._shares: dict[Segment, int] = {}  # which share of the sequences a cost was measured on
        self._rises: list[float] = []  # of costs when they were measured on all sequences after half of them
        self._measure([(before, after) for before, _, after in self._triples()])

    def __len__(self) -> int:
        """How many segments were measured."""
        return len(self._costs)

    def cheapest(self, full_layers: int) -> Pattern:
        """The pattern with `full_layers` `F` layers whose segments cost least together.

        Raises:
            SearchError: if there are fewer layers that can be `F`.
        """
        enough = max(0, self._everything - 1)
        while True:
            pattern = cheapest_segments(self.estimates(), full_layers, self._native.shared_layers)
            segments = self._segments(pattern)
            rough = [item for item in segments if self._share(item) < enough]
            if rough:
                least = min(map(self._share, rough))
                self._measure([item for item in rough if self._share(item) == least])
            elif enough == self._everything:
                return pattern
            else:
                [cost] = self._judge.scout([pattern], self._native, self._everything)
                together = sum(self._costs[item] for item in segments)
                if cost - together <= self._judge.noise(pattern, self._native):
                    return pattern
                enough = self._everything

    def estimates(self) -> NDArray[np.float64]:
        """`[N, N + 1]`, what each segment costs as far as that is known; infinite where a segment can't be."""
        rise = max(1.0, median(self._rises)) if self._rises else 1.0
        costs = np.full((len(self._native), len(self._native) + 1), np.inf)
        alone = {layer: max(0.0, self._costs[before, after]) for before, layer, after in self._triples()}
        for number, source in enumerate(self._heads[:-1]):
            value = 0.0
            for before, end in itertools.pairwise(self._heads[number:]):
                if (source, end) in self._costs:
                    value = self._costs[source, end]
                elif before != source:
                    value = max(0.0, value) + alone[before]
                sure = self._share((source, end)) == self._everything
                costs[source, end] = value if sure else value * rise
        return costs

    def _segments(self, pattern: Pattern) -> list[Segment]:
        """Those of `pattern` that are not the native pattern's."""
        return [item for item in itertools.pairwise([*pattern.full_layers, len(pattern)]) if item not in self._unshared]

    def _share(self, segment: Segment) -> int:
        return self._shares.get(segment, -1)

    def _measure(self, segments: list[Segment]) -> None:
        """Measure segments on the share after the one they were measured on, which is the same for all."""
        if not segments:
            return
        share = self._share(segments[0]) + 1
        full = [[layer for layer in self._heads[:-1] if not source < layer < end] for source, end in segments]
        patterns = [Pattern.from_full_layers(len(self._native), layers) for layers in full]
        found = dict(zip(segments, self._judge.scout(patterns, self._native, share), strict=True))
        if 0 < share == self._everything:
            self._rises += [found[item] / self._costs[item] for item in segments if self._costs[item] > 0]
        self._costs |= found
        self._shares |= dict.fromkeys(segments, share)

    def _triples(self) -> list[tuple[int, int, int]]:
        """Each layer that can change to `S`, between the `F` layer before it and the one after, or the end."""
        return list(zip(self._heads, self._heads[1:], self._heads[2:], strict=False))
