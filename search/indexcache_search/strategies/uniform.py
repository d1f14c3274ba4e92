"""The paper's uniform interleaving, at any phase."""

from __future__ import annotations

from fractions import Fraction

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import DirectStrategy, Goal, Problem
from sglang_indexcache import Pattern
from sglang_indexcache.errors import PatternError


def uniform_pattern(native: Pattern, retention: Fraction, phase: int = 0) -> Pattern:
    """The paper's uniform pattern at `retention`, for a checkpoint whose own pattern is `native`.

    Raises:
        SearchError: if the retention is not 1/n, or a locked layer would have to be `F`.
    """
    if retention.numerator != 1:
        raise SearchError(f"uniform needs retentions of the form 1/n, found {retention}")
    pattern = Pattern.uniform(len(native), retention.denominator, phase)
    try:
        pattern.check_fits(len(native), native.shared_layers)
    except PatternError as error:
        raise SearchError(f"uniform {retention}: {error}") from None
    return pattern


class Uniform(DirectStrategy):
    """One of the paper's baselines."""

    name = "uniform"
    summary = "the paper's uniform patterns"

    def check(self, goal: Goal) -> None:
        for retention in goal.full_layers:
            uniform_pattern(goal.native, retention)
        super().check(goal)

    def planned(self, goal: Goal) -> int:
        return len(goal.full_layers)

    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        return [uniform_pattern(problem.goal.native, retention)]
