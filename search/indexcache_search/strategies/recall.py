"""Kascade's objective: how much of a layer's attention another layer's pages hold (arXiv 2512.16391)."""

from __future__ import annotations

from fractions import Fraction

from indexcache_search.strategies.base import DirectStrategy, Goal, Problem, only_dense
from indexcache_search.strategies.similarity import similarity_pattern
from sglang_indexcache import Pattern


class Recall(DirectStrategy):
    """An exact dynamic program over recalled attention, as Kascade's, with one choice for all heads."""

    name = "recall"
    summary = "dense models: no pattern, but how much attention another layer's pages hold (Kascade's objective)"

    def check(self, goal: Goal) -> None:
        only_dense(self.name, goal)
        super().check(goal)

    def planned(self, goal: Goal) -> int:
        return len(goal.full_layers)

    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        matrix = problem.needed("recall")
        return [similarity_pattern(matrix, problem.goal.full_layers[retention], problem.goal.native)]
