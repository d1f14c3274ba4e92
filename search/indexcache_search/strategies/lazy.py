"""Lazy greedy: Algorithm 1, except that most flips of a step keep the cost of their last evaluation.

Minoux, "Accelerated greedy algorithms for maximizing submodular set functions", 1978.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Outcome, Problem, Step, Strategy
from indexcache_search.strategies.greedy import fixed_layers
from indexcache_search.strategies.swaps import last_check, swap_line
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

LAYERS_A_SWAP = 3  # the last check tries one swap per 3 layers


class LazyFlips:
    """Lazy search that repeatedly flips the cheapest `F` layer and remembers the cost of the others.

    Every flip is first evaluated on half of the sequences. Each step evaluates the few with the lowest last cost on all
    sequences, then more while the next one's old cost is below the best new cost. Old costs mislead where flips
    interact, so the `F` layer above the last flip is always evaluated: its source has just changed. A flip that on half
    of the sequences is clearly worse than the best so far, and dearer than the best is on all, runs no further.

    A step is not raced on fewer sequences, where some flip always looks cheaper than it is, and flips are permanent. It
    evaluates at least `flips`, besides the layer above the last flip.

    Attributes:
        pattern: the current pattern.
    """

    def __init__(self, start: Pattern, judge: Judge, flips: int) -> None:
        self.pattern = start
        self._judge, self._flips = judge, flips
        self._fixed = fixed_layers(start, 1)
        self._costs: dict[int, float] = {}  # last evaluated cost of flipping each layer
        self._flipped: dict[int, float] = {}  # cost of committed flips, in order
        self._seen: set[int] = set()  # layers whose flip the last step evaluated

    def flip(self) -> Step:
        """Commit the cheapest flip of `pattern`."""
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
        """Return swaps of an `S` and an `F` layer that were not evaluated yet, the most promising first.

        The promise is judged by the last evaluated costs of both flips.
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
        """Return the layers that may still become `S`."""
        return [layer for layer in self.pattern.full_layers if layer not in self._fixed]

    def _once_cheaper(self, order: list[int], cost: float) -> list[int]:
        """Return the first of `order` not yet seen in this step, if its last cost was below `cost`."""
        return [layer for layer in order if layer not in self._seen and self._costs[layer] < cost][:1]

    def _close(self, layers: list[int], best: int) -> list[int]:
        """Return those of `layers` whose flips may cost less than that of `best`, judging by half of the sequences."""
        most, half = self._costs[best], self._judge.half
        costs, flipped = self._measure(layers, half), self.pattern.share(best)
        return [
            layer
            for layer in layers
            if costs[layer] < most or not self._judge.clearly_worse(self.pattern.share(layer), flipped, half)
        ]

    def _measure(self, layers: list[int], rows: Sequence[int]) -> dict[int, float]:
        """Measure the cost of flipping each of `layers` alone on `rows`."""
        estimates = self._judge.scout([self.pattern.share(layer) for layer in layers], self.pattern, rows)
        costs = {layer: item.mean for layer, item in zip(layers, estimates, strict=True)}
        self._costs |= costs
        return costs

    def _step(self, best: int, costs: dict[int, float]) -> Step:
        [before, after] = self._judge.losses([self.pattern, self.pattern.share(best)])
        self.pattern, self._flipped[best] = self.pattern.share(best), costs[best]
        return Step(best, self.pattern, after, {layer: before + costs[layer] for layer in sorted(costs)})


@dataclass(frozen=True, kw_only=True)
class Lazy(Strategy):
    """Algorithm 1 with few flips per step, and a check of swaps for each requested pattern.

    Attributes:
        flips: minimum number of flips that a step evaluates.
    """

    name = "lazy"
    summary = "every flip once, then a few each step, then swaps; a trajectory that serves any retention"
    flips: int = 1

    def find(self, problem: Problem) -> Outcome:
        """Follow the lazy trajectory to the smallest retention, and check swaps at each one."""
        counts = problem.goal.full_layers
        steps, ranked = self.trajectory(problem)
        return Outcome(
            {retention: ranked[count][0] for retention, count in counts.items()},
            tuple(steps),
            {retention: ranked[count][1:] for retention, count in counts.items()},
        )

    def trajectory(self, problem: Problem) -> tuple[list[Step], dict[int, list[Pattern]]]:
        """Flip down to the goal's fewest `F` layers; for each of its counts rank the patterns run on all sequences."""
        native, judge, wanted = problem.goal.native, problem.judge, problem.goal.full_layers.values()
        flips, steps = LazyFlips(native, judge, self.flips), list[Step]()
        ranked, tries = {len(native.full_layers): [native]}, math.ceil(len(native) / LAYERS_A_SWAP)
        while len(flips.pattern.full_layers) > problem.goal.fewest:
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
