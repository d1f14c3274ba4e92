"""Search for a pattern of least loss within a time, whose `F` layers may select for several prompt queries at a time.

The cost of a block depends on the layers that reuse its selection. So it is measured on patterns of `F` and `S` with
many and few `F` layers, and `BudgetFit` makes each of them fit the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import Goal, Outcome, Problem, TimeGoal, by_count
from indexcache_search.strategies.budget.fit import BudgetFit
from indexcache_search.strategies.lazy import Lazy
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

PARTS = (1.0, 0.7, 0.45, 0.2)  # shares of the layers that are `F` in the patterns that are made to fit
LOOKS = 3  # maximum rounds of re-measuring blocks
ROUNDS = 2  # maximum rounds of the last check
TRIED = 8  # patterns raced per round


@dataclass(frozen=True, kw_only=True)
class BudgetSearch(Lazy):
    """Strategy that fits patterns on the way of `Lazy` into a time, then races them."""

    swaps: int = field(default=0, init=False)

    def check(self, goal: Goal) -> None:
        """Check that some pattern on the way takes no more than the time."""
        super().check(goal)
        budget, native = _budget_of(goal), goal.native
        fewest = native.keeping([*native.full_layers[:1]])
        if not BudgetFit.possible(fewest, budget, native):
            largest = max(budget.queries, default=1)
            least = budget.prices.prompt_share(fewest.selecting_for(0, largest), native)
            blocks = f" in blocks of {largest}" if budget.queries else ""
            raise SearchError(
                f"--prefill is {budget.share:g}, expected at least {math.ceil(least * 1000) / 1000}: what one F layer"
                f"{blocks} takes at {budget.prices.context} tokens"
            )

    def find(self, problem: Problem) -> Outcome:
        """Follow the trajectory of `F` and `S`, fit its patterns into the time, and improve the best."""
        outcome = super().find(problem)
        goal, judge = problem.goal, problem.judge
        budget, on_the_way = _budget_of(goal), by_count(goal.native, outcome.steps)
        fits = list[BudgetFit]()
        for count in _counts(budget, goal, min(on_the_way)):
            pattern = on_the_way[count]
            if BudgetFit.possible(pattern, budget, goal.native):
                fits.append(BudgetFit(pattern, judge, budget, goal.native, fits[::-1]))
        counts = ", ".join(str(len(fit.pattern.full_layers)) for fit in fits)
        problem.notice(f"blocks of queries: {len(fits)} patterns of {counts} F layers are made to fit")
        losses = _promising(fits, judge)
        if not losses:
            raise SearchError(
                f"--prefill is {budget.share:g}, and no pattern of {min(on_the_way)} F layers or more takes so little;"
                " expected more, or a smaller --retain"
            )
        return replace(outcome, within_budget=self._checked(losses, fits, budget, problem))

    def _checked(
        self, losses: dict[Pattern, float], fits: list[BudgetFit], budget: TimeGoal, problem: Problem
    ) -> Pattern:
        """Improve the best of the patterns by other blocks of a layer, and by other `F` layers with blocks that fit."""
        judge, native = problem.judge, problem.goal.native
        for _ in range(ROUNDS):
            best = min(losses, key=lambda pattern: (losses[pattern], pattern.letters))
            guides = sorted(fits, key=lambda fit: sum(map(operator.ne, fit.pattern.roles, best.roles)))
            near = [
                item
                for item in dict.fromkeys(_neighbours(best, guides, budget, judge, native))
                if item not in losses and budget.fits(item, native) and len(item.full_layers) <= budget.most_full
            ]
            if not near:
                break
            tried = list(judge.ranked(near, native))[:TRIED]
            winner = tried[judge.choose(tried, native).best]
            [losses[winner]] = judge.losses([winner])
            if losses[winner] >= losses[best]:
                break
        return min(losses, key=lambda pattern: (losses[pattern], pattern.letters))


def _budget_of(goal: Goal) -> TimeGoal:
    assert isinstance(goal.budget, TimeGoal)
    return goal.budget


def _promising(fits: Sequence[BudgetFit], judge: Judge) -> dict[Pattern, float]:
    """Return the picks of `fits` with their losses; re-measure picks that were expected to be best but are not."""
    losses: dict[Pattern, float] = {}
    asked = list(fits)
    for _ in range(LOOKS):
        picked = {fit: pattern for fit in asked if (pattern := fit.best()) and pattern not in losses}
        losses |= zip(picked.values(), judge.losses(list(picked.values())), strict=True)
        least = min(losses.values(), default=math.inf)
        asked = [fit for fit, pattern in picked.items() if fit.expected(pattern) < least]
        for fit in asked:
            fit.look_again(picked[fit])
    return losses


def _counts(budget: TimeGoal, goal: Goal, fewest: int) -> list[int]:
    """Return the numbers of `F` layers to try, the most first."""
    most = min(budget.most_full, len(goal.native.full_layers))
    return sorted({max(fewest, math.ceil(part * most)) for part in PARTS}, reverse=True)


def _neighbours(
    pattern: Pattern, guides: Sequence[BudgetFit], budget: TimeGoal, judge: Judge, native: Pattern
) -> Iterator[Pattern]:
    """Yield patterns with a layer in another block, and with an `F` more, less or elsewhere in blocks that fit."""
    sizes = (1, *budget.queries)
    shared = [layer for layer in pattern.shared_layers if native[layer] == native.full_role]
    fewer = [pattern.share(layer) for layer in pattern.full_layers[1:]]
    for layer, now in pattern.queries.items():
        yield from (pattern.selecting_for(layer, number) for number in sizes if number != now)
    for other in shared:
        yield from (pattern.unshare(other).selecting_for(other, number) for number in sizes)
    yield from fewer
    letters = [*fewer, *(item.unshare(other) for item in (pattern, *fewer) for other in shared)]
    for plain in dict.fromkeys(native.keeping(item.full_layers) for item in letters):
        if len(plain.full_layers) <= budget.most_full and BudgetFit.possible(plain, budget, native):
            guess = BudgetFit(plain, judge, budget, native, guides).guess()
            if guess is not None:
                yield guess
