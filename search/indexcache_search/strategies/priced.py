"""Patterns whose layers may score less: an `F` for several prompt queries at a time, a `C` among candidates.

What that costs depends on what else the pattern shares: the layers that reuse a choice inherit it. So it is measured on
patterns of `F` and `S`, with fewer and with ever more `F` layers than can be paid in full, and an exact knapsack makes
each of them as cheap as is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from indexcache_search.strategies.base import Goal, Outcome, Problem, Strategy, by_count, find_each
from indexcache_search.strategies.lazy import Lazy, trajectory
from indexcache_search.strategies.prices import Prices
from sglang_indexcache import Pattern
from sglang_indexcache.errors import PatternError
from sglang_indexcache.indexers import Indexer

if TYPE_CHECKING:
    from indexcache_search.judge import Judge

UNITS = 512  # of an `F` layer's price, in the knapsack
SPARSER = (0.25, 0.5, 0.75)  # times as many `F` layers as can be paid in full, where others may choose among candidates
DENSER = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # and where blocks make them cheaper, or not
LOOKS = 4  # at what a pattern costs more than its indexers do, at most
ROUNDS = 3  # of the last check, at most
TRIED = 8  # patterns that a round races

Floats = NDArray[np.float64]


class Lightened:
    """Makes one pattern as cheap as is asked for, where that costs least.

    First every layer is tried with every indexer that it may have on the first share of the sequences; what an exact
    knapsack over those picks is measured on half of them, until it picks what was measured so. Some indexers cost
    nothing but on rare sequences: where a pick as a whole costs more than its indexers did, they are tried on those
    sequences, too.

    Args:
        pattern: of `F` and `S`.
        judge: evaluates on growing shares of the sequences.
        prices: of indexers.
        native: the checkpoint's own pattern; what is `S` there has no indexer.
    """

    def __init__(self, pattern: Pattern, judge: Judge, prices: Prices, native: Pattern) -> None:
        self._pattern, self._judge, self._prices = pattern, judge, prices
        self._enough = judge.shares.index(judge.half)
        self._costs: dict[Indexer, float] = {}
        self._shares: dict[Indexer, int] = {}
        blocks = [number for number in prices.queries if number > 1]
        items = [Indexer(layer=layer, queries=number) for layer in pattern.full_layers for number in blocks]
        shared = [layer for layer in pattern.shared_layers if native[layer] == native.letter]
        items += [Indexer(layer=layer, candidates=count) for layer in shared for count in prices.candidates]
        self._options = {layer: [item for item in items if item.layer == layer] for layer in range(len(pattern))}
        if items:
            self._measure(items)

    def within(self, budget: float) -> Pattern | None:
        """The pattern that is expected to lose least for at most `budget`; `None` if none costs so little."""
        while True:
            picked = self._picked(budget)
            if picked is None:
                return None
            rough = [item for item in picked if self._shares[item] < self._enough]
            if not rough:
                return with_indexers(self._pattern, picked)
            least = min(self._shares[item] for item in rough)
            self._measure([item for item in rough if self._shares[item] == least])

    def expected(self, pattern: Pattern) -> float:
        """The loss of `pattern` on all sequences, if its indexers cost together what each costs alone."""
        [alone] = self._judge.losses([self._pattern])
        return alone + sum(self._costs[item] for item in pattern.indexers)

    def look_again(self, pattern: Pattern) -> None:
        """Try the blocks of `pattern` where it costs most as a whole; elsewhere they can't cost much."""
        items = [item for item in pattern.indexers if item.queries]  # candidates cost less than nothing
        rows = self._judge.telling(pattern, self._pattern)
        share = len(rows) / len(self._judge.shares[-1])
        patterns = [with_indexers(self._pattern, [item]) for item in items]
        for item, estimate in zip(items, self._judge.scout(patterns, self._pattern, rows), strict=True):
            self._costs[item] = max(self._costs[item], share * estimate.mean)

    def _measure(self, items: list[Indexer]) -> None:
        """Measure indexers on the share after the one they were measured on."""
        share = self._shares.get(items[0], -1) + 1
        patterns = [with_indexers(self._pattern, [item]) for item in items]
        estimates = self._judge.scout(patterns, self._pattern, self._judge.shares[share])
        for item, estimate in zip(items, estimates, strict=True):
            self._costs[item], self._shares[item] = estimate.mean, share

    def _picked(self, budget: float) -> list[Indexer] | None:
        """The knapsack, exact but for prices rounded up to one part in `UNITS`.

        From layer to layer it keeps the least loss for every sum, apart for every number of candidates that the last
        `F` layer gives, 0 for none: that layer pays for it, and those after it may choose from them.
        """
        room = math.floor(budget * UNITS + 1e-6)
        given = (0, *self._prices.candidates)
        best = np.zeros((len(given), room + 1))  # least loss for at most so much
        kinds, choices, before = [], [], []
        for layer in self._options:
            before.append(best.argmin(axis=0))  # what the last `F` layer gives, before this one
            if layer in self._pattern.full_layers:
                best = np.broadcast_to(best.min(axis=0), best.shape)
            kinds.append([self._kinds(layer, count) for count in given])
            losses = [self._losses(start, items) for start, items in zip(best, kinds[-1], strict=True)]
            choices.append([rows.argmin(axis=0) for rows in losses])
            best = np.stack([rows.min(axis=0) for rows in losses])
        at = int(best[:, room].argmin())
        if not np.isfinite(best[at, room]):
            return None
        picked = []
        for layer in reversed(self._options):
            item, units = kinds[layer][at][choices[layer][at][room]]
            picked += [item] if item else []
            room -= units
            at = int(before[layer][room]) if layer in self._pattern.full_layers else at
        return picked

    def _kinds(self, layer: int, count: int) -> list[tuple[Indexer | None, int]]:
        """What a layer may be, with its units, where the last `F` layer gives `count` candidates (an `F` layer: it)."""
        prices, options = self._prices, self._options[layer]
        if layer not in self._pattern.full_layers:
            rescoring = [item for item in options if item.candidates == count]
            return [(None, 0), *((item, _units(prices.candidates[count])) for item in rescoring)]
        if count:
            return [(None, _units(prices.queries[1] + prices.selecting[count]))]
        return [
            (None, _units(prices.queries[1])),
            *((item, _units(prices.queries[item.queries])) for item in options),
        ]

    def _losses(self, start: Floats, kinds: Sequence[tuple[Indexer | None, int]]) -> Floats:
        """`[kinds, sums]`: the least loss with each kind, from that of the layers before."""
        losses = np.full((len(kinds), len(start)), np.inf)
        for row, (item, units) in zip(losses, kinds, strict=True):
            if units < len(start):
                row[units:] = start[: len(start) - units] + (0.0 if item is None else self._costs[item])
        return losses


def _units(price: float) -> int:
    return math.ceil(price * UNITS - 1e-6)


def with_indexers(pattern: Pattern, indexers: Iterable[Indexer]) -> Pattern:
    """`pattern` with these, which make some of its `S` layers `C`."""
    for item in indexers:
        if item.candidates:
            pattern = pattern.rescoring(item.layer, item.candidates)
        else:
            pattern = pattern.selecting_for(item.layer, item.queries)
    return pattern


class Priced(Strategy):
    """Patterns on the way of `Lazy`, with several numbers of `F` layers, made as cheap as is asked for, then raced."""

    name = Lazy.name
    summary = Lazy.summary

    def find(self, problem: Problem) -> Outcome:
        goal, budgets = problem.goal, problem.goal.full_layers
        fewest = min(count for budget in budgets.values() for count in (budget, *_counts(budget, goal)))
        steps, ranked = trajectory(problem, fewest, budgets.values())
        on_the_way = by_count(goal.native, steps)
        plain = {retention: ranked[budget][0] for retention, budget in budgets.items()}
        lightened: dict[int, Lightened] = {}  # by the number of `F` layers

        def checked(retention: Fraction) -> list[Pattern]:
            budget = budgets[retention]
            for count in _counts(budget, goal):
                if count not in lightened:
                    lightened[count] = Lightened(on_the_way[count], problem.judge, _prices(goal), goal.native)
            looked_at = [lightened[count] for count in _counts(budget, goal)]
            return self._checked(_hopeful(plain[retention], looked_at, budget, problem.judge), budget, problem)

        outcome = find_each(problem, checked)
        problem.notice(f"tried indexers that score less on {len(lightened)} patterns")
        return Outcome(outcome.patterns, rivals=outcome.rivals, plain=plain)

    def _checked(self, patterns: Sequence[Pattern], budget: float, problem: Problem) -> list[Pattern]:
        """`patterns`, and what changes of a layer or a swap make of the best, all run on all sequences, best first."""
        judge, prices, native = problem.judge, _prices(problem.goal), problem.goal.native
        most = _most_full(problem.goal)
        losses = dict(zip(patterns, judge.losses(patterns), strict=True))
        for _ in range(ROUNDS):
            best = min(losses, key=lambda pattern: (losses[pattern], pattern.letters))
            near = [item for item in _neighbours(best, prices, native) if item not in losses]
            near = [item for item in near if prices.cost(item) <= budget + 1e-9 and len(item.full_layers) <= most]
            if not near:
                break
            tried = list(judge.ranked(near, native))[:TRIED]
            winner = tried[judge.choose(tried, native).best]
            [losses[winner]] = judge.losses([winner])
            if losses[winner] >= losses[best]:
                break
        return sorted(losses, key=lambda pattern: (losses[pattern], pattern.letters))


def _hopeful(plain: Pattern, lightened: Sequence[Lightened], budget: float, judge: Judge) -> list[Pattern]:
    """`plain`, and what each of `lightened` makes of its own; anew while that should be the best of all, but is not."""
    losses = dict(zip([plain], judge.losses([plain]), strict=True))
    asked = list(lightened)
    for _ in range(LOOKS):
        picked = {item: pattern for item in asked if (pattern := item.within(budget)) and pattern not in losses}
        losses |= zip(picked.values(), judge.losses(list(picked.values())), strict=True)
        least = min(losses.values())
        asked = [item for item, pattern in picked.items() if item.expected(pattern) < least]
        for item in asked:
            item.look_again(picked[item])
    return list(losses)


def _prices(goal: Goal) -> Prices:
    """Which a search over prices has."""
    assert goal.prices is not None
    return goal.prices


def _most_full(goal: Goal) -> int:
    """`F` layers that a pattern has at most."""
    return len(goal.native.full_layers) if goal.most_full is None else goal.most_full


def _counts(budget: int, goal: Goal) -> list[int]:
    """Numbers of `F` layers that are looked at for `budget`."""
    times = (*(SPARSER if _prices(goal).candidates else ()), *(DENSER if len(_prices(goal).queries) > 1 else (1.0,)))
    return sorted({min(_most_full(goal), max(1, math.ceil(item * budget))) for item in times})


def _neighbours(pattern: Pattern, prices: Prices, native: Pattern) -> Iterator[Pattern]:
    """Patterns of which a layer has another indexer or none, or an `F` and an `S` trade."""
    blocks, counts = list(prices.queries), list(prices.candidates)
    free = [layer for layer in range(1, len(pattern)) if native[layer] == native.letter]
    shared = [layer for layer in free if layer in pattern.shared_layers]
    ways = [
        partial(pattern.selecting_for, layer, number)
        for layer, now in pattern.queries.items()
        for number in blocks
        if number != now
    ]
    ways += [partial(pattern.share, layer) for layer in free if layer not in shared]
    ways += [partial(_chosen, pattern, layer, number) for layer in shared for number in blocks]
    ways += [partial(pattern.rescoring, layer, count) for layer in free for count in counts]
    ways += [
        partial(_chosen, pattern, other, pattern.queries[layer], layer)
        for layer in pattern.full_layers[1:]
        for other in shared
    ]
    found: dict[Pattern, None] = {}
    for way in ways:
        with suppress(PatternError):  # an `F` layer in blocks has no candidates to give
            found[way()] = None
    found.pop(pattern, None)
    yield from found


def _chosen(pattern: Pattern, layer: int, queries: int, instead: int | None = None) -> Pattern:
    """`pattern` with an `F` for an `S` layer, in the place of another `F` layer or besides."""
    pattern = pattern if instead is None else pattern.share(instead)
    return pattern.unshare(layer).selecting_for(layer, queries)
