"""Search for a pattern of D, F and S of least loss whose decode steps read at most some bytes.

From layers that are all `D` on, the flip of a layer to `F` or `S` is committed that costs least for the bytes that it
saves, until the pattern fits. Costs are measured as `lazy` does: all once on half of the sequences, then a few a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from indexcache_dense.strategies.page_bytes import PageGoal
from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import Goal, Outcome, Problem
from indexcache_search.strategies.lazy import Lazy
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE, FULL, SHARED

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

LOWER = {DENSE: (FULL, SHARED), FULL: (SHARED,), SHARED: ()}  # what reads less than a letter
ROUNDS = 3  # maximum rounds of the last check
TRIED = 8  # patterns raced per round


@dataclass(frozen=True)
class Flip:
    """One layer with another letter."""

    layer: int
    letter: str


class PageFlips:
    """Search that repeatedly commits the flip that costs least for the bytes it saves, with remembered costs.

    Args:
        start: first pattern.
        judge: compares patterns.
        goal: what a step may read.
        flips: flips that a step evaluates on all sequences at least, besides those of the layer that was flipped.

    Attributes:
        pattern: the current pattern.
    """

    def __init__(self, start: Pattern, judge: Judge, goal: PageGoal, flips: int) -> None:
        self.pattern, self._judge, self._goal, self._flips = start, judge, goal, flips
        self._costs: dict[Flip, float] = {}
        self._last: int | None = None

    def flip(self) -> bool:
        """Commit the best flip; return false if none saves anything."""
        saved = {flip: self._saved(flip) for flip in lower(self.pattern)}
        flips = [flip for flip, amount in saved.items() if amount > 0]
        if not flips:
            return False
        self._measure([flip for flip in flips if flip not in self._costs], self._judge.half)
        order = sorted(flips, key=lambda flip: (self._price(flip, saved), flip.layer, flip.letter))
        again = [flip for flip in flips if flip.layer == self._last]
        group, known = list(dict.fromkeys([*order[: self._flips], *again])), dict[Flip, float]()
        while group:
            self._measure(group, self._judge.shares[-1])
            known |= {flip: self._price(flip, saved) for flip in group}
            least = min(known.values())
            group = [flip for flip in order if flip not in known and self._price(flip, saved) < least][:1]
        best = min(known, key=lambda flip: (known[flip], flip.layer, flip.letter))
        self.pattern, self._last = flipped(self.pattern, best), best.layer
        self._costs = {flip: cost for flip, cost in self._costs.items() if flip.layer != best.layer}
        return True

    def _saved(self, flip: Flip) -> float:
        return self._goal.bytes.step(self.pattern) - self._goal.bytes.step(flipped(self.pattern, flip))

    def _price(self, flip: Flip, saved: dict[Flip, float]) -> float:
        """Return the cost for each byte saved; of a flip that costs nothing, the more it saves the better."""
        cost = self._costs[flip]
        return cost / saved[flip] if cost > 0 else cost * saved[flip] - saved[flip]

    def _measure(self, flips: Sequence[Flip], rows: Sequence[int]) -> None:
        patterns = [flipped(self.pattern, flip) for flip in flips]
        estimates = self._judge.scout(patterns, self.pattern, rows) if patterns else []
        self._costs |= {flip: item.mean for flip, item in zip(flips, estimates, strict=True)}


def flipped(pattern: Pattern, flip: Flip) -> Pattern:
    """Return a pattern after a flip."""
    roles = pattern.roles[: flip.layer] + flip.letter + pattern.roles[flip.layer + 1 :]
    return replace(pattern, roles=roles)


def lower(pattern: Pattern) -> Iterator[Flip]:
    """Yield the flips to letters that read less; the first layer has nothing to share."""
    for layer, role in enumerate(pattern.roles):
        yield from (Flip(layer, letter) for letter in LOWER[role] if layer or letter != SHARED)


def higher(pattern: Pattern) -> Iterator[Flip]:
    """Yield the flips to letters that read more."""
    for layer, role in enumerate(pattern.roles):
        yield from (Flip(layer, letter) for letter in (FULL, DENSE) if role in LOWER[letter])


@dataclass(frozen=True, kw_only=True)
class PageSearch(Lazy):
    """Strategy that also fits a pattern of `D`, `F` and `S` into the bytes that a decode step may read."""

    swaps: int = field(default=0, init=False)

    def check(self, goal: Goal) -> None:
        """Check that some pattern reads no more than the bytes."""
        super().check(goal)
        budget = _budget_of(goal)
        least = budget.bytes.share(replace(goal.native, roles=FULL + SHARED * (len(goal.native) - 1)))
        if least > budget.share:
            raise SearchError(
                f"--bytes is {budget.share:g}, expected at least {math.ceil(least * 1000) / 1000}: what one F layer and"
                f" S layers read at {budget.bytes.context} tokens"
            )

    def find(self, problem: Problem) -> Outcome:
        """Follow the trajectory of `D` and `S`, then flip down to the bytes, and improve what fits."""
        outcome = super().find(problem)
        goal, judge = problem.goal, problem.judge
        budget, native = _budget_of(goal), goal.native
        flips = PageFlips(native, judge, budget, self.flips)
        while not budget.fits(flips.pattern) and flips.flip():
            problem.notice(f"bytes: {flips.pattern.roles} reads {budget.bytes.share(flips.pattern):.3f}")
        walked = [native, *(step.pattern for step in outcome.steps), *outcome.patterns.values()]
        found = [item for item in dict.fromkeys([flips.pattern, *walked]) if budget.fits(item)]
        losses = dict(zip(found, judge.losses(found), strict=True))
        return replace(
            outcome, within_budget=_improved(min(losses, key=lambda item: (losses[item], item.roles)), problem)
        )


def _budget_of(goal: Goal) -> PageGoal:
    assert isinstance(goal.budget, PageGoal)
    return goal.budget


def _improved(best: Pattern, problem: Problem) -> Pattern:
    """Give a layer a letter that reads more, and another one that reads less, while that lowers the loss."""
    judge, native, budget = problem.judge, problem.goal.native, _budget_of(problem.goal)
    for _ in range(ROUNDS):
        up, down = list(higher(best)), list(lower(best))
        rows = judge.informative_rows(best, native)
        estimates = judge.scout([flipped(best, flip) for flip in (*up, *down)], best, rows)
        costs = {flip: item.mean for flip, item in zip((*up, *down), estimates, strict=True)}
        near = {flipped(best, flip): costs[flip] for flip in up}
        near |= {
            flipped(flipped(best, raised), other): costs[raised] + costs[other]
            for raised in up
            for other in down
            if raised.layer != other.layer
        }
        fitting = [item for item in near if budget.fits(item)]
        tried = sorted(fitting, key=lambda item: (near[item], item.roles))[:TRIED]
        if not tried:
            break
        winner = tried[judge.choose(tried, best).best]
        if judge.difference(winner, best).mean >= -judge.noise(winner, best) / 2:
            break
        best = winner
        [loss] = judge.losses([best])
        problem.notice(f"bytes: {best.roles} reads {budget.bytes.share(best):.3f}, loss {loss:.4f}")
    return best
