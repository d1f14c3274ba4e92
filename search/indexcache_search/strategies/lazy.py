"""Lazy greedy: as Algorithm 1, but most candidates of a step keep what they cost when they were last evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Problem, Step, SteppingStrategy
from indexcache_search.strategies.greedy import check_reachable, fixed_layers
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.judge import Judge


class LazyFlips:
    """Finds the flip of an `F` layer that costs least, and remembers what the others cost.

    The first time every candidate is evaluated, later the `at_least` that were cheapest when last seen; then more while
    the next one's old cost is within the noise of the best new one. Old costs mislead where flips interact, so the
    `F` layer above the last flip is looked at in any case: what it would reuse has just changed.

    Args:
        start: the pattern that the search begins with.
        judge: compares patterns.
        at_least: candidates a step.
        at_most: candidates a step, the layer above the last flip not counted.
    """

    def __init__(self, start: Pattern, judge: Judge, at_least: int, at_most: int) -> None:
        self._judge, self._at_least, self._at_most = judge, at_least, max(at_least, at_most)
        self._fixed = fixed_layers(start, 1)
        self._costs: dict[int, float] = {}  # of flipping a layer, when last evaluated
        self._last: int | None = None

    def next(self, pattern: Pattern) -> Step:
        """The cheapest flip of `pattern`."""
        candidates = [layer for layer in pattern.full_layers if layer not in self._fixed]
        unknown = [layer for layer in candidates if layer not in self._costs]
        order = unknown + sorted(set(candidates) - set(unknown), key=lambda layer: (self._costs[layer], layer))
        group = order[: max(self._at_least, len(unknown))]
        limit = max(self._at_most, len(group))
        above = next((layer for layer in candidates if self._last is not None and layer > self._last), None)
        if above is not None and above not in group:
            group, limit = [*group, above], limit + 1
        seen: list[int] = []
        racers: list[int] = []
        while group:
            racers = [*racers, *group]
            choice = self._judge.choose([pattern.share(layer) for layer in racers], pattern)
            self._costs |= dict(zip(racers, choice.increases, strict=True))
            seen, racers, loss = seen + group, [racers[choice.best]], choice.loss
            group = self._worth_a_look(pattern, racers[0], [layer for layer in order if layer not in seen])
            if len(seen) >= limit:
                break
        [layer] = racers
        self._last = layer
        before = loss - self._costs[layer]
        return Step(
            layer,
            pattern.share(layer),
            loss,
            {candidate: before + self._costs[candidate] for candidate in sorted(seen)},
        )

    def _worth_a_look(self, pattern: Pattern, best: int, rest: list[int]) -> list[int]:
        """The first of `rest`, unless the best flip beats its old cost by more than noise."""
        if not rest:
            return []
        margin = self._judge.noise(pattern.share(best), pattern)
        return rest[:1] if self._costs[rest[0]] < self._costs[best] + margin else []


def lazy_greedy(start: Pattern, stop: int, judge: Judge, at_least: int, at_most: int) -> Iterator[Step]:
    """Flip layers from `F` to `S`, each time the one that `LazyFlips` finds.

    Args:
        start: all `F`, but for locked layers.
        stop: `F` layers to end with.
        judge: compares patterns.
        at_least: see `LazyFlips`.
        at_most: see `LazyFlips`.

    Raises:
        SearchError: if `stop` can't be reached.
    """
    check_reachable(start, stop)
    flips, pattern = LazyFlips(start, judge, at_least, at_most), start
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
        return lazy_greedy(goal.native, goal.fewest, problem.judge, *goal.candidates)
