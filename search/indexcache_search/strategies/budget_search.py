"""Search for patterns whose `F` layers may select for several prompt queries, within a budget of indexer prices.

The cost of a block depends on the layers that reuse its selection. So it is measured on patterns of `F` and `S` with
more `F` layers than the budget pays in full, and `BudgetFit` makes each of them fit the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Goal, Outcome, Problem, by_count, find_each
from indexcache_search.strategies.budget_fit import BudgetFit
from indexcache_search.strategies.lazy import Lazy
from indexcache_search.strategies.prices import cost
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

DENSER = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times as many `F` layers as can be paid in full
LOOKS = 4  # maximum rounds of re-measuring blocks
ROUNDS = 3  # maximum rounds of the last check
TRIED = 8  # patterns raced per round


@dataclass(frozen=True, kw_only=True)
class BudgetSearch(Lazy):
    """Strategy that fits patterns on the way of `Lazy` into the budget, then races them."""

    swaps: int = field(default=0, init=False)

    def find(self, problem: Problem) -> Outcome:
        """Fit patterns with several numbers of `F` layers into each budget, and improve the best."""
        goal, budgets = problem.goal, problem.goal.full_layers
        steps, ranked = self.trajectory(problem)
        on_the_way = by_count(goal.native, steps)
        plain = {retention: ranked[budget][0] for retention, budget in budgets.items()}
        fits: dict[int, BudgetFit] = {}  # by the number of `F` layers

        def checked(retention: Fraction) -> list[Pattern]:
            budget = budgets[retention]
            counts = _counts(budget, goal)
            for count in counts:
                if count not in fits:
                    fits[count] = BudgetFit(on_the_way[count], problem.judge, goal.prices)
            promising = _promising(plain[retention], [fits[count] for count in counts], budget, problem.judge)
            return self._checked(promising, budget, problem)

        outcome = find_each(problem, checked)
        problem.notice(f"tried blocks of queries on {len(fits)} patterns")
        return Outcome(outcome.patterns, rivals=outcome.rivals, plain=plain)

    def _checked(self, patterns: Sequence[Pattern], budget: float, problem: Problem) -> list[Pattern]:
        """Improve the best of `patterns` by changes of a layer and swaps; return all that ran, best first."""
        judge, prices, native = problem.judge, problem.goal.prices, problem.goal.native
        most = _most_full(problem.goal)
        losses = dict(zip(patterns, judge.losses(patterns), strict=True))
        for _ in range(ROUNDS):
            best = min(losses, key=lambda pattern: (losses[pattern], pattern.letters))
            near = [item for item in _neighbours(best, prices, native) if item not in losses]
            near = [item for item in near if cost(item, prices) <= budget + 1e-9 and len(item.full_layers) <= most]
            if not near:
                break
            tried = list(judge.ranked(near, native))[:TRIED]
            winner = tried[judge.choose(tried, native).best]
            [losses[winner]] = judge.losses([winner])
            if losses[winner] >= losses[best]:
                break
        return sorted(losses, key=lambda pattern: (losses[pattern], pattern.letters))


def _promising(plain: Pattern, fits: Sequence[BudgetFit], budget: float, judge: Judge) -> list[Pattern]:
    """Return `plain` and the picks of `fits`; re-measure picks that were expected to be best but are not."""
    losses = dict(zip([plain], judge.losses([plain]), strict=True))
    asked = list(fits)
    for _ in range(LOOKS):
        picked = {fit: pattern for fit in asked if (pattern := fit.within(budget)) and pattern not in losses}
        losses |= zip(picked.values(), judge.losses(list(picked.values())), strict=True)
        least = min(losses.values())
        asked = [fit for fit, pattern in picked.items() if fit.expected(pattern) < least]
        for fit in asked:
            fit.look_again(picked[fit])
    return list(losses)


def _most_full(goal: Goal) -> int:
    """Return the maximum number of `F` layers of a pattern."""
    return len(goal.native.full_layers) if goal.most_full is None else goal.most_full


def _counts(budget: int, goal: Goal) -> list[int]:
    """Return the numbers of `F` layers to try for `budget`."""
    return sorted({min(_most_full(goal), math.ceil(times * budget)) for times in DENSER})


def _neighbours(pattern: Pattern, prices: Mapping[int, float], native: Pattern) -> Iterator[Pattern]:
    """Yield patterns with a layer in another block, shared or unshared, or with an `F` and an `S` swapped."""
    shared = [layer for layer in pattern.shared_layers if native[layer] == native.full_role]
    for layer, now in pattern.queries.items():
        yield from (pattern.selecting_for(layer, number) for number in prices if number != now)
    for layer in pattern.full_layers[1:]:
        yield pattern.share(layer)
    for other in shared:
        yield from (pattern.unshare(other).selecting_for(other, number) for number in prices)
    for layer in pattern.full_layers[1:]:
        for other in shared:
            yield pattern.share(layer).unshare(other).selecting_for(other, pattern.queries[layer])
