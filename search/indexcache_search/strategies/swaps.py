"""Local search: trade one `F` for one `S` while that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from indexcache_search.judge import Judge
from indexcache_search.strategies.base import Goal, Outcome, Problem, Strategy
from sglang_indexcache import Pattern


@dataclass(frozen=True)
class Swap:
    """`shared` became `S` and `full` became `F`, which gave `pattern` with `loss`."""

    shared: int
    full: int
    pattern: Pattern
    loss: float


def improve(pattern: Pattern, native: Pattern, judge: Judge, tries: int) -> Iterator[Swap]:
    """Swap layers of `pattern` while the loss falls by more than the standard error of the difference.

    What each layer alone costs as `S` and gains as `F` is measured on a small share of the sequences; the `tries` swaps
    that look best by the sum of both are raced, beside all moves of an `F` to the next layer, where sums mislead most.

    Args:
        pattern: where to begin.
        native: the checkpoint's own; its `S` layers stay.
        judge: compares patterns.
        tries: swaps a round, moves to the next layer not counted.
    """
    while True:
        full = [layer for layer in pattern.full_layers if layer != 0]
        shared = [layer for layer in pattern.shared_layers if native[layer] == native.letter]
        if not full or not shared:
            return
        alone = [pattern.share(layer) for layer in full] + [pattern.unshare(layer) for layer in shared]
        change = {layer: cost.mean for layer, cost in zip([*full, *shared], judge.scout(alone, pattern), strict=True)}
        ranked = sorted(
            (
                (change[newly_shared] + change[newly_full], newly_shared, newly_full)
                for newly_shared in full
                for newly_full in shared
            ),
        )
        pairs = [(newly_shared, newly_full) for _, newly_shared, newly_full in ranked[:tries]]
        pairs += [
            (newly_shared, newly_full)
            for _, newly_shared, newly_full in ranked[tries:]
            if abs(newly_shared - newly_full) == 1
        ]
        patterns = [pattern.share(newly_shared).unshare(newly_full) for newly_shared, newly_full in pairs]
        choice = judge.choose(patterns, pattern)
        swapped = patterns[choice.best]
        if choice.increases[choice.best] >= -judge.noise(swapped, pattern):
            return
        pattern = swapped
        yield Swap(*pairs[choice.best], swapped, choice.loss)


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
        for swap in improve(pattern, problem.goal.native, problem.judge, self._tries):
            kept, total, letter = len(swap.pattern.full_layers), len(pattern), pattern.letter
            problem.notice(
                f"swap: layer {swap.shared:>3} -> S, {swap.full:>3} -> {letter}, {kept} of {total} {letter},"
                f" loss {swap.loss:.4f}"
            )
            pattern = swap.pattern
        return pattern
