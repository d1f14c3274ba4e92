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
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.estimates import Estimate
    from indexcache_search.judge import Judge

Segment = tuple[int, int]
"""(source, end): layers `source` + 1 to `end` - 1 reuse the indices of `source`."""

MOST_CHECKED = 8  # patterns that run on all sequences for each retention
PROPOSALS = 64  # cheapest patterns by their segments, among which the next one to run is chosen
ROUNDS = 3  # of the last check, at most
SWAPS = 4  # of an F and an S layer that a round races, at least
PART = 8  # and one in so many of all
FEW = 2  # swaps for each layer, up to which all of them are tried
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

    The last check needs no expectation: of the patterns that differ from the best one by a swap of an `F` and an `S`
    layer, those race whose segments cost least, and the winner runs on all sequences; again, while that finds a better
    one. (The best pattern itself does not race: what beats it on all sequences may look worse on a few.) Where few
    layers stay `F`, segments are long and their sum says little, but swaps are few: there all of them run on the first
    share of the sequences, and those race as well that cost least on it.

    Args:
        native: the checkpoint's own pattern.
        judge: evaluates on growing shares of the sequences.
    """

    def __init__(self, native: Pattern, judge: Judge) -> None:
        self._native, self._judge, self._everything = native, judge, len(judge.shares) - 1
        self._enough = max(0, self._everything - 1)  # the share of the sequences that segments are measured on
        self._heads = [*native.full_layers, len(native)]  # where a segment can begin or end
        self._unshared = set(itertools.pairwise(self._heads))  # segments of the native pattern; they cost nothing
        self._costs: dict[Segment, Estimate] = {}
        self._shares: dict[Segment, int] = {}  # which share of the sequences a cost was measured on
        self._checked: dict[int, list[Checked]] = {}  # by the number of F layers
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
        """As `cheapest`, once swaps of an `F` and an `S` layer of the best pattern were tried; see the class."""
        checked = self.cheapest(full_layers)
        for _ in range(ROUNDS):
            swapped = self._swapped(checked)
            if not swapped:
                break
            winner = self._judge.choose([item.pattern for item in swapped], self._native).best
            best, checked = checked[0], sorted([*checked, self._run(swapped[winner])], key=_rank)
            if checked[0] is best:
                break
        self._checked[full_layers] = checked
        return checked

    def _swapped(self, checked: list[Checked]) -> list[Proposal]:
        """The swaps of the first of `checked` that promise most, without what is among `checked`."""
        best, done, costs = checked[0].pattern, {item.pattern for item in checked}, self.estimates()
        patterns = best.neighbours(self._native.shared_layers)
        proposals = [Proposal(pattern, _total(costs, pattern)) for pattern in patterns if pattern not in done]
        proposals.sort(key=lambda item: (item.predicted, item.pattern.roles))
        count = max(SWAPS, len(proposals) // PART)
        chosen = proposals[:count]
        if len(proposals) <= FEW * len(self._native):
            tried = self._judge.scout([item.pattern for item in proposals], self._native)
            order = sorted(range(len(proposals)), key=lambda at: (tried[at].mean, at))
            chosen += [proposals[at] for at in order[:count] if at >= count]
        return chosen

    def _run(self, proposal: Proposal) -> Checked:
        [cost] = self._judge.scout([proposal.pattern], self._native, self._everything)
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
        self._costs |= zip(segments, self._judge.scout(patterns, self._native, share), strict=True)
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
