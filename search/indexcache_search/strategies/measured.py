"""Strategies that take their patterns from one measurement of the model."""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import DirectStrategy, Goal, Problem
from sglang_indexcache import Pattern


class MeasuredStrategy(DirectStrategy):
    """Evaluates no pattern to find one: a rule reads them off the matrix of `Matrices` that has the strategy's name.

    Attributes:
        dense: whether only layers that choose pages can be measured so.
    """

    dense: ClassVar[bool]

    @abstractmethod
    def pattern(self, matrix: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
        """The pattern that the rule takes.

        Args:
            matrix: what was measured.
            full_layers: layers that are not shared, layer 0 included.
            native: the model's own pattern.

        Raises:
            SearchError: if there are fewer layers that can do without sharing.
        """

    def check(self, goal: Goal) -> None:
        if self.dense and not goal.native.dense:
            raise SearchError(
                f"--strategy {self.name} is for dense models, whose layers choose pages; expected another one"
            )
        super().check(goal)

    def planned(self, goal: Goal) -> int:
        return len(goal.full_layers)

    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        goal = problem.goal
        return [self.pattern(problem.needed(self.name), goal.full_layers[retention], goal.native)]
