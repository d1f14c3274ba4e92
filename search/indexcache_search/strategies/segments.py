"""A measured model of what sharing costs: how the loss rises when one segment of layers alone shares its first indices.

Segments are patterns, so any engine can measure them; and a segment's cost holds how its layers interact, which costs
of single layers do not. What is left out is how segments interact, so a pattern is believed only once it ran itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.base import Outcome, Problem, Strategy, find_each
from indexcache_search.strategies.dynamic_program import cheapest_patterns
from indexcache_search.strategies.swaps import GAIN, Flips
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.estimates import Estimate
    from indexcache_search.judge import Judge

Segment = tuple[int, int]
"""(source, end): layers `source` + 1 to `end` - 1 reuse the indices of `source`."""

MOST_CHECKED = 3  # patterns that run on all sequences for each retention, before the last check
PROPOSALS = 64  # cheapest patterns by their segments, among which the next one to run is chosen
ROUNDS = 4  # of the last check, at most
ONE_IN = 7  # swaps of an F and an S layer is tried by a round, on the rows that tell most,
TRIED = (4, 16)  # but at least and at most so many
RUN = 2  # of them at most run on all sequences
FEW = 2  # swaps for each layer, up to which F layers are few
ROUNDING = 1e-9
LEAST_OF_COST = 0.5  # of what was measured on few sequences, however uncertain


@dataclass(frozen=True)
class Proposal:
    """A pattern, and what its segments cost together."""

    pattern: Pattern
    predicted: float


@dataclass(frozen=True)
class Checked(Proposal):
    """A pattern that ran on all sequences, and what it costs itself."""

    cost: float


class SegmentCosts:
    """Finds the pattern that costs least, and measures no more segments than that takes.

    First every layer is shared alone, on the first share of the sequences. A segment that was not measured is taken to
    cost what its longest measured beginning does and its other layers alone: reuse from further away rarely costs less,
    so this errs on the low side. What was measured on few sequences is taken a standard error lower. So a dynamic
    program proposes too much rather than too little, and what it proposes is measured, until every segment of its
    pattern was measured on half of the sequences.

    Then the pattern runs itself, on all of them. Where segments interact it costs more than they do together, and other
    patterns are expected to do so by as much as they have segments in common with it. The next best are proposed,
    measured and run in turn, until none is expected to cost less than the best that ran.

    The last check needs no expectation: swaps of an `F` and an `S` layer of the best pattern are tried, on the rows
    that tell most about it. The better half of them goes on to half of the sequences, and the best two of those that
    still cost less run on all. The best is taken if it costs less by more than half of the standard error of the
    difference, as is what ran before; then swaps of that one. (What costs less by less is as likely to cost more on
    other text.) Which swaps are tried is decided by what flips of single layers cost, once for the first best pattern.

    Few `F` layers make long segments, and these and flips say little. There all swaps run on the first share, which
    decides instead; and the check may begin at what is left of the pattern with more `F` layers that was found, once
    the layers that cost least were taken from it one by one.

    Args:
        native: the checkpoint's own pattern.
        judge: evaluates on growing shares of the sequences.
    """

    def __init__(self, native: Pattern, judge: Judge) -> None:
        self._native, self._judge = native, judge
        self._enough = judge.shares.index(judge.half)  # the share of the sequences that segments are measured on
        self._heads = [*native.full_layers, len(native)]  # where a segment can begin or end
        self._unshared = set(itertools.pairwise(self._heads))  # segments of the native pattern; they cost nothing
        self._costs: dict[Segment, Estimate] = {}
        self._shares: dict[Segment, int] = {}  # which share of the sequences a cost was measured on
        self._checked: dict[int, list[Checked]] = {}  # by the number of F layers
        self._best: dict[int, Checked] = {}  # likewise, after the last check
        self._measure([(before, after) for before, _, after in self._triples()])

    def __len__(self) -> int:
        """How many segments were measured."""
        return len(self._costs)

    def cheapest(self, full_layers: int) -> list[Checked]:
        """The patterns with `full_layers` `F` layers that ran on all sequences, the one that costs least first.

        What other numbers of layers had measured in between is looked at when asked again.

        Raises:
            SearchError: if there are fewer layers that can be `F`.
        """
        checked = self._checked.setdefault(full_layers, [])
        while len(checked) < MOST_CHECKED:
            proposal = self._measured_proposal(full_layers, checked)
            if proposal is None:
                break
            checked.append(self._run(proposal))
        return sorted(checked, key=_rank)

    def proposed(self, full_layers: int) -> Pattern:
        """The pattern whose segments cost least together, all measured on half of the sequences; it did not run itself.

        Raises:
            SearchError: as `cheapest`.
        """
        proposal = self._measured_proposal(full_layers, [])
        assert proposal is not None  # nothing ran that could be better
        return proposal.pattern

    def last_check(self, full_layers: int) -> list[Checked]:
        """As `cheapest`, once swaps of an `F` and an `S` layer of the best pattern were tried; see the class.

        The first is the one to take. Another may cost less, by less than the difference is uncertain.
        """
        if full_layers not in self._best:
            checked = self.cheapest(full_layers)
            nested = self._nested(full_layers) if self._few(self._swaps(full_layers)) else None
            if nested is not None and nested not in {item.pattern for item in checked}:
                checked = sorted([*checked, self._run(self._proposal(nested))], key=_rank)
            best, flips = checked[0], Flips(checked[0].pattern, self._native, self._judge)
            for _ in range(ROUNDS):
                better = self._better(best, flips, checked)
                if better is None:
                    break
                best = better
            self._checked[full_layers], self._best[full_layers] = checked, best
        best = self._best[full_layers]
        return [best, *sorted((item for item in self._checked[full_layers] if item is not best), key=_rank)]

    def _nested(self, full_layers: int) -> Pattern | None:
        """What is left of the next larger pattern once layers were taken from it; `None` if none was asked for."""
        larger = [count for count in self._checked if count > full_layers]
        if not larger:
            return None
        pattern = start = self.last_check(min(larger))[0].pattern
        rows = self._judge.telling(start, self._native)
        while len(pattern.full_layers) > full_layers:
            smaller = [pattern.share(layer) for layer in pattern.full_layers[1:]]
            pattern = next(iter(self._judge.ranked(smaller, start, rows)))
        return pattern

    def _better(self, best: Checked, flips: Flips, checked: list[Checked]) -> Checked | None:
        """What costs least of all that ran, if less than `best` by more than is noise; promising swaps run before."""
        checked += [self._run(self._proposal(pattern)) for pattern in self._promising(best.pattern, flips, checked)]
        cheaper = [item for item in checked if item.cost < best.cost]
        better = [
            item for item in cheaper if best.cost - item.cost > GAIN * self._judge.noise(item.pattern, best.pattern)
        ]
        return min(better, key=_rank, default=None)

    def _promising(self, best: Pattern, flips: Flips, checked: list[Checked]) -> list[Pattern]:
        """The swaps that cost less where that tells most, without `checked`; the best first."""
        done = {item.pattern for item in checked}
        swaps = [pattern for pattern in best.neighbours(self._native.shared_layers) if pattern not in done]
        number = self._swaps(len(best.full_layers))
        ranked = list(self._judge.ranked(swaps, best)) if self._few(number) else flips.ranked(swaps)
        tries = min(max(math.ceil(number / ONE_IN), TRIED[0]), TRIED[1])
        promising = self._cheaper(ranked[:tries], best, flips.rows)[: max(RUN, math.ceil(tries / 2))]
        if len(promising) > RUN:
            promising = self._cheaper(promising, best, sorted({*flips.rows, *self._judge.half}))
        return promising[:RUN]

    def _cheaper(self, patterns: list[Pattern], best: Pattern, rows: list[int]) -> list[Pattern]:
        """Those that cost less than `best` on `rows`, the best first."""
        return [pattern for pattern, cost in self._judge.ranked(patterns, best, rows).items() if cost < 0]

    def _swaps(self, full_layers: int) -> int:
        """How many swaps a pattern with so many `F` layers has."""
        return (full_layers - 1) * (len(self._native.full_layers) - full_layers)

    def _few(self, swaps: int) -> bool:
        """Whether so many are at most `FEW` a layer."""
        return swaps <= FEW * len(self._native)

    def _proposal(self, pattern: Pattern) -> Proposal:
        return Proposal(pattern, _total(self.estimates(), pattern))

    def _run(self, proposal: Proposal) -> Checked:
        [cost] = self._judge.scout([proposal.pattern], self._native, self._judge.shares[-1])
        return Checked(proposal.pattern, proposal.predicted, cost.mean)

    def _measured_proposal(self, full_layers: int, checked: list[Checked]) -> Proposal | None:
        """The next pattern to run; `None` if none is expected to cost less than the best of `checked`."""
        done = {item.pattern for item in checked}
        least = min((item.cost for item in checked), default=math.inf)
        while True:
            known = cheapest_patterns(self.estimates(), full_layers, self._native, PROPOSALS)
            proposals = [
                (cost + self._interaction(pattern, checked), Proposal(pattern, cost))
                for cost, pattern in known
                if pattern not in done
            ]
            if not proposals:
                return None
            expected, proposal = min(proposals, key=lambda item: item[0])
            rough = [item for item in self._segments(proposal.pattern) if self._share(item) < self._enough]
            if not rough:  # what is not measured yet may still turn out to cost less than it seems
                return None if expected >= least - ROUNDING * abs(least) else proposal
            worst = min(map(self._share, rough))
            self._measure([item for item in rough if self._share(item) == worst])

    def _interaction(self, pattern: Pattern, checked: list[Checked]) -> float:
        """What a pattern is expected to cost beyond its segments: as those that ran, by the segments they share."""
        own = set(self._segments(pattern))
        excesses = [0.0]
        for item in checked:
            other = set(self._segments(item.pattern))
            excesses.append((item.cost - item.predicted) * len(own & other) / max(1, len(own | other)))
        return max(excesses)

    def estimates(self) -> NDArray[np.float64]:
        """`[N, N + 1]`, what each segment costs as far as that is known; infinite where a segment can't be."""
        costs = np.full((len(self._native), len(self._native) + 1), np.inf)
        alone = {layer: max(0.0, self._low(before, after)) for before, layer, after in self._triples()}
        for number, source in enumerate(self._heads[:-1]):
            value = 0.0
            for before, end in itertools.pairwise(self._heads[number:]):
                if (source, end) in self._costs:
                    value = self._low(source, end)
                elif before != source:
                    value = max(0.0, value) + alone[before]
                costs[source, end] = value
        return costs

    def _low(self, source: int, end: int) -> float:
        """A measured cost; what was measured on few sequences a standard error lower, but not less than half of it."""
        cost = self._costs[source, end]
        if self._share((source, end)) >= self._enough:
            return cost.mean
        return max(cost.mean - (cost.stderr or 0.0), LEAST_OF_COST * cost.mean)

    def _segments(self, pattern: Pattern) -> list[Segment]:
        """Those of `pattern` that are not the native pattern's."""
        return [item for item in _row(pattern) if item not in self._unshared]

    def _share(self, segment: Segment) -> int:
        return self._shares.get(segment, -1)

    def _measure(self, segments: list[Segment]) -> None:
        """Measure segments on the share after the one they were measured on, which is the same for all."""
        if not segments:
            return
        share = self._share(segments[0]) + 1
        full = [[layer for layer in self._heads[:-1] if not source < layer < end] for source, end in segments]
        patterns = [self._native.keeping(layers) for layers in full]
        self._costs |= zip(segments, self._judge.scout(patterns, self._native, self._judge.shares[share]), strict=True)
        self._shares |= dict.fromkeys(segments, share)

    def _triples(self) -> list[tuple[int, int, int]]:
        """Each layer that can change to `S`, between the `F` layer before it and the one after, or the end."""
        return list(zip(self._heads, self._heads[1:], self._heads[2:], strict=False))


def _row(pattern: Pattern) -> Iterator[Segment]:
    """The segments that `pattern` is made of."""
    return itertools.pairwise([*pattern.full_layers, len(pattern)])


def _total(costs: NDArray[np.float64], pattern: Pattern) -> float:
    """What the segments of `pattern` cost together."""
    return float(sum(costs[segment] for segment in _row(pattern)))


def _rank(item: Checked) -> tuple[float, str]:
    return item.cost, item.pattern.roles


class Segments(Strategy):
    """The cheapest row of segments, believed once it ran itself."""

    name = "segments"
    summary = "runs of layers that share, then the cheapest patterns made of them; a pattern per retention"

    def find(self, problem: Problem) -> Outcome:
        goal, costs = problem.goal, SegmentCosts(problem.goal.native, problem.judge)
        for full_layers in goal.full_layers.values():
            costs.cheapest(full_layers)
        outcome = find_each(
            problem, lambda retention: [item.pattern for item in costs.last_check(goal.full_layers[retention])]
        )
        problem.notice(f"measured {len(costs)} segments of layers")
        return outcome
