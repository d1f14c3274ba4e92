"""Strategies that derive patterns from one measurement of the model."""

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
    """Strategy that applies a rule to the matrix of `Matrices` with its own name, without evaluating patterns.

    Attributes:
        dense: true if only layers that select pages can be measured so.
    """

    dense: ClassVar[bool]

    @abstractmethod
    def pattern(self, matrix: NDArray[np.float64], full_layers: int, native: Pattern) -> Pattern:
        """Derive a pattern with so many layers that are not shared, layer 0 included, from `matrix`.

        Raises:
            SearchError: if fewer layers can go unshared.
        """

    def check(self, goal: Goal) -> None:
        """Check that the model supports the measurement and `goal` can be reached."""
        if self.dense and not goal.native.dense:
            raise SearchError(
                f"--strategy {self.name} is for dense models, whose layers choose pages; expected another one"
            )
        super().check(goal)

    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        """Return the derived pattern for one retention."""
        goal = problem.goal
        return [self.pattern(problem.needed(self.name), goal.full_layers[retention], goal.native)]
