"""The paper's uniform interleaving."""

from __future__ import annotations

from fractions import Fraction

from indexcache_search.strategies.base import DirectStrategy, Goal, Problem
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import uniform_pattern


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
