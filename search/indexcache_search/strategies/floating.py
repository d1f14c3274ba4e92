"""Floating selection: greedy that takes back a flip which later ones have made a bad one.

Pudil, Novovičová and Kittler, "Floating search methods in feature selection", 1994, with lazy steps in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator

from indexcache_search.judge import Judge
from indexcache_search.strategies.greedy import Step, check_reachable
from indexcache_search.strategies.lazy import LazyFlips
from sglang_indexcache import Pattern


def floating(start: Pattern, stop: int, judge: Judge, at_least: int, at_most: int) -> Iterator[Step]:
    """Flip layers to `S` as lazy greedy does; after each, take one back if that beats the best with as many `F`.

    Looked at for that are the `at_most` layers that cost most when they were flipped, and the neighbours of the last
    flip. To count, the loss must fall by more than the standard error of the difference, so this ends.

    Args:
        start: all `F`, but for locked layers.
        stop: `F` layers to end with.
        judge: compares patterns.
        at_least: see `LazyFlips`.
        at_most: see `LazyFlips`.

    Yields:
        Steps; one that takes a flip back has an `F` at its layer. The best pattern with a number of `F` layers is the
        last one yielded with that number.

    Raises:
        SearchError: if `stop` can't be reached.
    """
    check_reachable(start, stop)
    flips = LazyFlips(start, judge, at_least, at_most)
    best = {len(start.full_layers): (judge.losses([start])[0], start)}
    price: dict[int, float] = {}  # of each flip, when it was made
    pattern = start
    while len(pattern.full_layers) > stop:
        step = flips.next(pattern)
        price[step.layer] = step.loss - best[len(pattern.full_layers)][0]
        count = len(step.pattern.full_layers)
        if count in best and best[count][0] <= step.loss:
            pattern = best[count][1]  # the way back has led to nothing better
            continue
        best[count], pattern = (step.loss, step.pattern), step.pattern
        yield step
        back = _take_back(pattern, step.layer, price, start, judge, at_most)
        if back is None:
            continue
        loss, rival = best[count + 1]
        if back.loss < loss - judge.noise(back.pattern, rival):
            best[count + 1], pattern = (back.loss, back.pattern), back.pattern
            yield back


def _take_back(
    pattern: Pattern, last: int, price: dict[int, float], start: Pattern, judge: Judge, at_most: int
) -> Step | None:
    """The best pattern with one more `F`, if there is one to try."""
    shared = [layer for layer in pattern.shared_layers if start[layer] == "F" and layer != last]
    dear = sorted(shared, key=lambda layer: (-price[layer], layer))[:at_most]
    near = [layer for layer in (last - 1, last + 1) if layer in shared]
    layers = sorted({*dear, *near})
    if not layers:
        return None
    patterns = [pattern.unshare(layer) for layer in layers]
    choice = judge.choose(patterns, pattern)
    losses = {
        layer: choice.loss - choice.increases[choice.best] + choice.increases[at] for at, layer in enumerate(layers)
    }
    return Step(layers[choice.best], patterns[choice.best], choice.loss, losses)
