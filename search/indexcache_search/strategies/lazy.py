"""Lazy greedy: as Algorithm 1, but most flips of a step keep what they cost when they were last evaluated.

Minoux, "Accelerated greedy algorithms for maximizing submodular set functions", 1978.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Outcome, Problem, Step, Strategy
from indexcache_search.strategies.greedy import fixed_layers
from indexcache_search.strategies.swaps import last_check, swap_line
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

LAYERS_A_SWAP = 3  # the last check tries one swap for so many layers


class LazyFlips:
    """Flips the `F` layer that costs least, again and again, and remembers what the others cost.

    Once, every flip is looked at, on half of the sequences. Each step evaluates the few that were cheapest when last
    seen, on all sequences; then more, while the next one's old cost is lower than what the best costs now. Old costs
    mislead where flips interact, so the `F` layer above the last flip is evaluated in any case: what it would reuse has
    just changed. What is clearly worse than the best so far on half of the sequences, and there dearer than that is on
    all, does not run on the others.

    A step is not raced further: on few sequences some flip always looks cheaper than it is, and what is flipped stays
    so.

    Args:
        start: the pattern that the search begins with.
        judge: compares patterns.
        flips: how many flips a step evaluates at least, the layer above the last flip not counted.

    Attributes:
        pattern: what is left of `start`.
    """

    def __init__(self, start: Pattern, judge: Judge, flips: int) -> None:
        self.pattern = start
        self._judge, self._flips = judge, flips
        self._fixed = fixed_layers(start, 1)
        self._costs: dict[int, float] = {}  # of flipping a layer, when last evaluated
        self._flipped: dict[int, float] = {}  # what layers cost that were flipped, the last one last
        self._seen: set[int] = set()  # layers whose flip the last step evaluated

    def flip(self) -> Step:
        """The cheapest flip of `pattern`, which is then without it."""
        layers = self._layers()
        if not self._costs:
            self._measure(layers, self._judge.half)
        order = sorted(layers, key=lambda layer: (self._costs[layer], layer))
        above = [layer for layer in layers if self._flipped and layer > next(reversed(self._flipped))][:1]
        best, *group = dict.fromkeys([*order[: self._flips], *above])
        self._seen, costs = {best}, self._measure([best], self._judge.shares[-1])
        while group := group or self._once_cheaper(order, costs[best]):
            self._seen |= set(group)
            costs |= self._measure(self._close(group, best), self._judge.shares[-1])
            best, group = min(costs, key=lambda layer: (costs[layer], layer)), []
        return self._step(best, costs)

    def swaps(self) -> list[Pattern]:
        """Trades of an `S` layer for an `F` layer that were not evaluated yet, those that promise most first.

        That is judged by what either's flip cost when it was last evaluated.
        """
        *_, last = self._flipped
        promise = {
            self.pattern.unshare(shared).share(full): self._costs[full] - cost
            for shared, cost in self._flipped.items()
            for full in self._layers()
            if shared != last or full not in self._seen
        }
        return sorted(promise, key=lambda pattern: (promise[pattern], pattern.roles))

    def _layers(self) -> list[int]:
        """Those that can be flipped."""
        return [layer for layer in self.pattern.full_layers if layer not in self._fixed]

    def _once_cheaper(self, order: list[int], cost: float) -> list[int]:
        """The first of `order` that this step has not seen, if it cost less than `cost` when last evaluated."""
        return [layer for layer in order if layer not in self._seen and self._costs[layer] < cost][:1]

    def _close(self, layers: list[int], best: int) -> list[int]:
        """Those of `layers` whose flips may cost less than that of `best`, judging by half of the sequences."""
        most, half = self._costs[best], self._judge.half
        costs, flipped = self._measure(layers, half), self.pattern.share(best)
        return [
            layer
            for layer in layers
            if costs[layer] < most or not self._judge.clearly_worse(self.pattern.share(layer), flipped, half)
        ]

    def _measure(self, layers: list[int], rows: Sequence[int]) -> dict[int, float]:
        """What flipping each of `layers` alone costs on `rows`."""
        estimates = self._judge.scout([self.pattern.share(layer) for layer in layers], self.pattern, rows)
        costs = {layer: item.mean for layer, item in zip(layers, estimates, strict=True)}
        self._costs |= costs
        return costs

    def _step(self, best: int, costs: dict[int, float]) -> Step:
        [before, after] = self._judge.losses([self.pattern, self.pattern.share(best)])
        self.pattern, self._flipped[best] = self.pattern.share(best), costs[best]
        return Step(best, self.pattern, after, {layer: before + costs[layer] for layer in sorted(costs)})


def trajectory(problem: Problem, stop: int, wanted: Collection[int]) -> tuple[list[Step], dict[int, list[Pattern]]]:
    """Flips to `stop` `F` layers, and for each of the numbers in `wanted` what ran on all sequences, the best first."""
    native, judge = problem.goal.native, problem.judge
    flips, steps = LazyFlips(native, judge, problem.goal.flips), list[Step]()
    ranked, tries = {len(native.full_layers): [native]}, math.ceil(len(native) / LAYERS_A_SWAP)
    while len(flips.pattern.full_layers) > stop:
        before, step = flips.pattern, flips.flip()
        steps.append(step)
        problem.on_step(step, tuple(steps))
        count = len(step.pattern.full_layers)
        if count in wanted:
            others = [before.share(layer) for layer in step.losses if layer != step.layer]
            ranked[count] = [*last_check(step.pattern, flips.swaps()[:tries], judge), *others]
            if ranked[count][0] != step.pattern:
                problem.notice(swap_line(step.pattern, ranked[count][0], judge))
    return steps, ranked


class Lazy(Strategy):
    """Algorithm 1 with few flips a step, and a look at swaps of each pattern that is asked for."""

    name = "lazy"
    settings = ("flips", "race", "swaps")
    summary = "every flip once, then a few each step, then swaps; a trajectory that serves any retention"

    def find(self, problem: Problem) -> Outcome:
        counts = problem.goal.full_layers
        steps, ranked = trajectory(problem, problem.goal.fewest, counts.values())
        return Outcome(
            {retention: ranked[count][0] for retention, count in counts.items()},
            tuple(steps),
            {retention: ranked[count][1:] for retention, count in counts.items()},
        )
