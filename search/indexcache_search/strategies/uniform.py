"""The paper's uniform interleaving."""

from __future__ import annotations

from fractions import Fraction

from indexcache_search.strategies.base import DirectStrategy, Goal, Problem
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import uniform_pattern


class Uniform(DirectStrategy):
    """Uniform baseline of the paper."""

    name = "uniform"
    summary = "the paper's uniform patterns"

    def check(self, goal: Goal) -> None:
        """Check that each retention has a uniform pattern."""
        for retention in goal.full_layers:
            uniform_pattern(goal.native, retention)
        super().check(goal)

    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        """Return the uniform pattern for one retention."""
        return [uniform_pattern(problem.goal.native, retention)]
