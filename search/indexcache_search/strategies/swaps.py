"""Local search: trade one `F` for one `S` while that helps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Goal, Outcome, Problem, Strategy
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

GAIN = 0.5  # standard errors of a difference by which the last check wants a swap to cost less


class Flips:
    """What a pattern costs when one layer alone is flipped in it, on the rows that tell most: one pattern a layer.

    A swap costs about what its two flips cost together.

    Args:
        pattern: where layers are flipped; it runs on all sequences.
        native: the checkpoint's own; its `S` layers stay.
        judge: evaluates.
    """

    def __init__(self, pattern: Pattern, native: Pattern, judge: Judge) -> None:
        self._pattern, self._native, self._judge = pattern, native, judge
        self._rows = judge.telling(pattern, native)

    def ranked(self, patterns: Iterable[Pattern]) -> list[Pattern]:
        """Patterns near the flipped one, those that promise most first."""
        return sorted(patterns, key=lambda item: (self._cost(item), item.roles))

    def _cost(self, pattern: Pattern) -> float:
        return math.fsum(cost for layer, cost in self._costs.items() if pattern[layer] != self._pattern[layer])

    @cached_property
    def _costs(self) -> dict[int, float]:
        """What each layer costs, flipped alone."""
        layers, before = self._native.full_layers[1:], self._pattern
        flipped = [
            before.share(layer) if before[layer] == before.full_role else before.unshare(layer) for layer in layers
        ]
        estimates = self._judge.scout(flipped, before, self._rows)
        return {layer: item.mean for layer, item in zip(layers, estimates, strict=True)}


def last_check(best: Pattern, swaps: Sequence[Pattern], judge: Judge) -> list[Pattern]:
    """What is to be taken of `best` and `swaps` of it; behind that, what else ran on all sequences.

    They run on growing shares of the sequences, and of those that cost less than `best` there the better half goes on.
    What is left is taken if it costs less by more than half of the standard error of the difference: what costs less by
    less is as likely to cost more on other text.
    """
    for rows in judge.shares[:-1]:
        cheaper = [swap for swap, cost in judge.ranked(swaps, best, rows).items() if cost < 0]
        swaps = cheaper[: math.ceil(len(cheaper) / 2)]
    ran = list(judge.ranked(swaps, best, judge.shares[-1]))
    if ran and judge.difference(ran[0], best).mean < -GAIN * judge.noise(ran[0], best):
        return [ran[0], best, *ran[1:]]
    return [best, *ran]


def improve(pattern: Pattern, native: Pattern, judge: Judge, tries: int) -> Iterator[Pattern]:
    """Swap layers of `pattern` while the loss falls by more than the standard error of the difference.

    The `tries` swaps that `Flips` holds for best are raced, beside all moves of an `F` to the next layer, where sums
    mislead most.

    Args:
        pattern: where to begin.
        native: the checkpoint's own; its `S` layers stay.
        judge: compares patterns.
        tries: swaps a round, moves to the next layer not counted.
    """
    while True:
        ranked = Flips(pattern, native, judge).ranked(pattern.neighbours(native.shared_layers))
        if not ranked:
            return
        patterns = ranked[:tries] + [item for item in ranked[tries:] if abs(operator.sub(*_traded(pattern, item))) == 1]
        choice = judge.choose(patterns, pattern)
        swapped = patterns[choice.best]
        if choice.increases[choice.best] >= -judge.noise(swapped, pattern):
            return
        yield swapped
        pattern = swapped


def swap_line(pattern: Pattern, swapped: Pattern, judge: Judge) -> str:
    """For people: what changed, and what that costs now."""
    (shared, full), [loss] = _traded(pattern, swapped), judge.losses([swapped])
    kept, total, letter = len(swapped.full_layers), len(swapped), swapped.full_role
    return f"swap: layer {shared:>3} -> S, {full:>3} -> {letter}, {kept} of {total} {letter}, loss {loss:.4f}"


def _traded(pattern: Pattern, swapped: Pattern) -> tuple[int, int]:
    """The layer that became `S`, and the one that became `F`."""
    [newly_shared] = set(pattern.full_layers) - set(swapped.full_layers)
    [newly_full] = set(swapped.full_layers) - set(pattern.full_layers)
    return newly_shared, newly_full


class Swapping(Strategy):
    """Another strategy, and local search from each pattern that it found.

    Args:
        strategy: finds patterns.
        tries: see `improve`.
    """

    def __init__(self, strategy: Strategy, tries: int) -> None:
        self._strategy, self._tries = strategy, tries

    def check(self, goal: Goal) -> None:
        self._strategy.check(goal)

    def find(self, problem: Problem) -> Outcome:
        outcome = self._strategy.find(problem)
        patterns = {retention: self._improved(pattern, problem) for retention, pattern in outcome.patterns.items()}
        return replace(outcome, patterns=patterns)

    def _improved(self, pattern: Pattern, problem: Problem) -> Pattern:
        for swapped in improve(pattern, problem.goal.native, problem.judge, self._tries):
            problem.notice(swap_line(pattern, swapped, problem.judge))
            pattern = swapped
        return pattern
