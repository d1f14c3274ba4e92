"""All patterns with a given number of `F` layers: the true optimum on a calibration set, where affordable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import DirectStrategy, Goal, Problem
from sglang_indexcache import Pattern

MOST_PATTERNS = 200_000


def count_patterns(native: Pattern, full_layers: int) -> int:
    """Count the patterns with `full_layers` `F` layers, all where the checkpoint has one."""
    return math.comb(len(native.full_layers) - 1, full_layers - 1)


def every_pattern(native: Pattern, full_layers: int) -> Iterator[Pattern]:
    """Yield each pattern with `full_layers` `F` layers, all where the checkpoint has one."""
    for kept in itertools.combinations(native.full_layers[1:], full_layers - 1):
        yield native.keeping([0, *kept])


def layers_to_run(patterns: list[Pattern]) -> int:
    """Count the layers run for all `patterns` if layers below the first difference are reused."""
    ordered = sorted(pattern.roles for pattern in patterns)
    total = len(ordered[0])
    for one, other in itertools.pairwise(ordered):
        total += next(len(one) - layer for layer in range(len(one)) if one[layer] != other[layer])
    return total


@dataclass(frozen=True, kw_only=True)
class Exhaustive(DirectStrategy):
    """Strategy that takes the best of all patterns; everything runs on all sequences."""

    name = "exhaustive"
    summary = "all patterns with as many F layers; says first what that costs"
    race: bool = field(default=False, init=False)

    def check(self, goal: Goal) -> None:
        """Check that `goal` can be reached with a feasible number of patterns."""
        super().check(goal)
        for retention, full_layers in goal.full_layers.items():
            number = count_patterns(goal.native, full_layers)
            if number > MOST_PATTERNS:
                raise SearchError(
                    f"--strategy exhaustive at {retention} is {number:,} patterns, expected at most {MOST_PATTERNS:,}"
                )

    def ranked(self, problem: Problem, retention: Fraction) -> list[Pattern]:
        """Return the best of all patterns for one retention."""
        goal = problem.goal
        full_layers = goal.full_layers[retention]
        patterns = list(every_pattern(goal.native, full_layers))
        algorithm_1 = goal.algorithm_1 * len(goal.native)
        problem.notice(
            f"{retention}: {len(patterns):,} patterns with {full_layers} {goal.native.full_role} layers,"
            f" {layers_to_run(patterns) / max(algorithm_1, 1):.0%} of the layer-tokens of Algorithm 1 where layers"
            " below the first difference are reused"
        )
        return [patterns[problem.judge.choose(patterns, goal.native).best]]
