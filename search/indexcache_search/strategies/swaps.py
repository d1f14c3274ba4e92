"""Local search: swap one `F` and one `S` while that lowers the loss."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from indexcache_search.strategies.base import Outcome, Problem
from sglang_indexcache import Pattern

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

GAIN = 0.5  # standard errors by which a swap must cost less in the last check


class Flips:
    """Costs of flipping single layers of a pattern, on the most informative rows: one pattern per layer.

    A swap costs about the sum of its two flips. The pattern runs on all sequences; the `S` layers of `native`, the
    checkpoint's own, stay.
    """

    def __init__(self, pattern: Pattern, native: Pattern, judge: Judge) -> None:
        self._pattern, self._native, self._judge = pattern, native, judge
        self._rows = judge.informative_rows(pattern, native)

    def ranked(self, patterns: Iterable[Pattern]) -> list[Pattern]:
        """Rank patterns near the flipped one, the most promising first."""
        return sorted(patterns, key=lambda item: (self._cost(item), item.roles))

    def _cost(self, pattern: Pattern) -> float:
        return math.fsum(cost for layer, cost in self._costs.items() if pattern[layer] != self._pattern[layer])

    @cached_property
    def _costs(self) -> dict[int, float]:
        """Cost of flipping each layer alone."""
        layers, before = self._native.full_layers[1:], self._pattern
        flipped = [
            before.share(layer) if before[layer] == before.full_role else before.unshare(layer) for layer in layers
        ]
        estimates = self._judge.scout(flipped, before, self._rows)
        return {layer: item.mean for layer, item in zip(layers, estimates, strict=True)}


def last_check(best: Pattern, swaps: Sequence[Pattern], judge: Judge) -> list[Pattern]:
    """Return the better of `best` and a swap of it, then all others that ran on all sequences.

    Swaps run on growing shares of the sequences; the better half of those cheaper than `best` goes on. The winner must
    cost less by more than half of the standard error of the difference: a smaller gain is as likely to be a loss on
    other text.
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

    The `tries` best swaps by `Flips` are raced, and all moves of an `F` to the next layer, where sums mislead most.
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
    """Describe a swap and the resulting loss for the user."""
    (shared, full), [loss] = _traded(pattern, swapped), judge.losses([swapped])
    kept, total, letter = len(swapped.full_layers), len(swapped), swapped.full_role
    return f"swap: layer {shared:>3} -> S, {full:>3} -> {letter}, {kept} of {total} {letter}, loss {loss:.4f}"


def _traded(pattern: Pattern, swapped: Pattern) -> tuple[int, int]:
    """Return the layer that became `S`, and the one that became `F`."""
    [newly_shared] = set(pattern.full_layers) - set(swapped.full_layers)
    [newly_full] = set(swapped.full_layers) - set(pattern.full_layers)
    return newly_shared, newly_full


def improved(outcome: Outcome, problem: Problem, tries: int) -> Outcome:
    """Improve each pattern that a strategy found, see `improve`."""

    def after_swaps(pattern: Pattern) -> Pattern:
        for swapped in improve(pattern, problem.goal.native, problem.judge, tries):
            problem.notice(swap_line(pattern, swapped, problem.judge))
            pattern = swapped
        return pattern

    return replace(outcome, patterns={kept: after_swaps(pattern) for kept, pattern in outcome.patterns.items()})
