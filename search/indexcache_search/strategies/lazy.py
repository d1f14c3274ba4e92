"""Lazy greedy: as Algorithm 1, but most flips of a step keep what they cost when they were last evaluated.

Minoux, "Accelerated greedy algorithms for maximizing submodular set functions", 1978.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Problem, Step, SteppingStrategy
from indexcache_search.strategies.greedy import check_reachable, fixed_layers
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.judge import Judge


class LazyFlips:
    """Finds the flip of an `F` layer that costs least, and remembers what the others cost.

    Once, every flip is looked at, on half of the sequences. Each step evaluates the few that were cheapest when last
    seen, on all sequences; then more, while the next one's old cost is lower than what the best costs now. Old costs
    mislead where flips interact, so the `F` layer above the last flip is evaluated in any case: what it would reuse has
    just changed.

    A step is not raced: on few sequences some flip always looks cheaper than it is, and what is flipped stays so.

    Args:
        start: the pattern that the search begins with.
        judge: compares patterns.
        candidates: how many flips a step evaluates at least, the layer above the last flip not counted.
    """

    def __init__(self, start: Pattern, judge: Judge, candidates: int) -> None:
        self._judge, self._candidates = judge, candidates
        self._fixed = fixed_layers(start, 1)
        self._costs: dict[int, float] = {}  # of flipping a layer, when last evaluated
        self._last: int | None = None

    def next(self, pattern: Pattern) -> Step:
        """The cheapest flip of `pattern`."""
        layers = [layer for layer in pattern.full_layers if layer not in self._fixed]
        if not self._costs:
            self._costs = self._measured(pattern, layers, self._judge.half)
        order = sorted(layers, key=lambda layer: (self._costs[layer], layer))
        above = [layer for layer in layers if self._last is not None and layer > self._last][:1]
        group = list(dict.fromkeys([*order[: self._candidates], *above]))
        costs: dict[int, float] = {}
        while group:
            costs |= self._measured(pattern, group, self._judge.shares[-1])
            least = min(costs.values())
            group = [layer for layer in order if layer not in costs and self._costs[layer] < least][:1]
        self._costs |= costs
        best = self._last = min(costs, key=lambda layer: (costs[layer], layer))
        [loss] = self._judge.losses([pattern.share(best)])
        before = loss - costs[best]
        return Step(best, pattern.share(best), loss, {layer: before + costs[layer] for layer in sorted(costs)})

    def _measured(self, pattern: Pattern, layers: list[int], rows: Sequence[int]) -> dict[int, float]:
        """What flipping each of `layers` alone costs on `rows`."""
        estimates = self._judge.scout([pattern.share(layer) for layer in layers], pattern, rows)
        return {layer: item.mean for layer, item in zip(layers, estimates, strict=True)}


def lazy_greedy(start: Pattern, stop: int, judge: Judge, candidates: int) -> Iterator[Step]:
    """Flip layers from `F` to `S`, each time the one that `LazyFlips` finds.

    Args:
        start: all `F`, but for locked layers.
        stop: `F` layers to end with.
        judge: compares patterns.
        candidates: see `LazyFlips`.

    Raises:
        SearchError: if `stop` can't be reached.
    """
    check_reachable(start, stop)
    flips, pattern = LazyFlips(start, judge, candidates), start
    while len(pattern.full_layers) > stop:
        step = flips.next(pattern)
        pattern = step.pattern
        yield step


class Lazy(SteppingStrategy):
    """Algorithm 1 with few candidates a step."""

    name = "lazy"
    summary = "every flip once, then a few each step; a trajectory that serves any retention"

    def walk(self, problem: Problem) -> Iterator[Step]:
        goal = problem.goal
        return lazy_greedy(goal.native, goal.fewest, problem.judge, goal.candidates)
