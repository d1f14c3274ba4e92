"""Patterns whose `F` layers may select for several prompt queries at a time, for as much as some that may not.

What blocks of queries cost depends on what else the pattern shares: the layers that reuse a choice inherit it. So it is
measured on patterns that share already, with ever more `F` layers, and an exact knapsack makes each of them as cheap as
is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from indexcache_search.strategies.base import Goal, Outcome, Problem, Strategy, find_each
from indexcache_search.strategies.segments import SegmentCosts, Segments
from sglang_indexcache import Pattern
from sglang_indexcache.indexers import EXACT_ROWS

if TYPE_CHECKING:
    from indexcache_search.judge import Judge

PRICE_CONTEXT = 131072
UNITS = 512  # of an `F` layer's price, in the knapsack
DENSER = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times as many `F` layers as can be paid in full
ROUNDS = 3  # of the last check, at most
TRIED = 8  # patterns that a round races


def price(queries: int, context: int) -> float:
    """What an `F` layer costs that selects for `queries` prompt queries at a time, relative to one that does not.

    Scores are counted: query t of a prompt of `context` tokens scores t keys, a block's leader once for all of them;
    the last `EXACT_ROWS` queries score for themselves.
    """
    exact = 1 - (1 - EXACT_ROWS / context) ** 2
    return exact + (1 - exact) / queries


def cost(pattern: Pattern, prices: Mapping[int, float]) -> float:
    """What the indexers of `pattern` cost, in `F` layers that score everything."""
    return sum(prices[queries] for queries in pattern.queries.values())


class Lightened:
    """Makes one pattern as cheap as is asked for, where that costs least.

    First every `F` layer is tried with every number of queries on the first share of the sequences; what an exact
    knapsack over those picks is measured on half of them, until it picks what was measured so.

    Args:
        pattern: whose layers share already.
        judge: evaluates on growing shares of the sequences.
        prices: see `Goal.prices`.
    """

    def __init__(self, pattern: Pattern, judge: Judge, prices: Mapping[int, float]) -> None:
        self._pattern, self._judge, self._prices = pattern, judge, prices
        self._enough = max(0, len(judge.shares) - 2)
        self._costs: dict[tuple[int, int], float] = {(layer, 1): 0.0 for layer in pattern.full_layers}
        self._shares: dict[tuple[int, int], int] = {}
        self._measure([(layer, queries) for layer in pattern.full_layers for queries in prices if queries > 1])

    def within(self, budget: float) -> Pattern | None:
        """The pattern that is expected to lose least for at most `budget`; `None` if none costs so little."""
        while True:
            picked = self._picked(budget)
            if picked is None:
                return None
            rough = [item for item in picked.items() if item[1] > 1 and self._shares[item] < self._enough]
            if not rough:
                return with_queries(self._pattern, picked)
            least = min(self._shares[item] for item in rough)
            self._measure([item for item in rough if self._shares[item] == least])

    def _measure(self, items: list[tuple[int, int]]) -> None:
        """Measure layers with numbers of queries on the share after the one they were measured on."""
        share = self._shares.get(items[0], -1) + 1
        patterns = [self._pattern.selecting_for(layer, queries) for layer, queries in items]
        for item, estimate in zip(items, self._judge.scout(patterns, self._pattern, share), strict=True):
            self._costs[item], self._shares[item] = estimate.mean, share

    def _picked(self, budget: float) -> dict[int, int] | None:
        """Queries by layer: the knapsack, exact but for prices rounded up to one part in `UNITS`."""
        room = math.floor(budget * UNITS + 1e-6)
        best, picks = np.zeros(room + 1), []  # least loss for at most so much, of the layers so far
        units = {queries: math.ceil(value * UNITS - 1e-6) for queries, value in self._prices.items()}
        for layer in self._pattern.full_layers:
            options = np.full((len(units), room + 1), np.inf)
            for number, (queries, spent) in enumerate(units.items()):
                if spent <= room:
                    options[number, spent:] = best[: room + 1 - spent] + self._costs[layer, queries]
            picks.append(options.argmin(axis=0))
            best = options.min(axis=0)
        if not np.isfinite(best[room]):
            return None
        picked, names = {}, list(units)
        for layer, choice in zip(reversed(self._pattern.full_layers), reversed(picks), strict=True):
            picked[layer] = names[choice[room]]
            room -= units[picked[layer]]
        return picked


def with_queries(pattern: Pattern, queries: Mapping[int, int]) -> Pattern:
    """`pattern` with `F` layers that select for so many prompt queries at a time."""
    for layer, number in queries.items():
        pattern = pattern.selecting_for(layer, number)
    return pattern


class Priced(Strategy):
    """The cheapest row of segments for several numbers of `F` layers, made as cheap as is asked for, then raced."""

    name = Segments.name
    summary = Segments.summary

    def find(self, problem: Problem) -> Outcome:
        goal, costs = problem.goal, SegmentCosts(problem.goal.native, problem.judge)
        plain: dict[Fraction, Pattern] = {}
        lightened: dict[Pattern, Lightened] = {}

        def ranked(retention: Fraction) -> list[Pattern]:
            budget = goal.full_layers[retention]
            plain[retention] = costs.last_check(budget)[0].pattern
            found = [plain[retention]]
            for count in _counts(budget, _most_full(goal)):
                base = plain[retention] if count == budget else costs.proposed(count)
                if base not in lightened:
                    lightened[base] = Lightened(base, problem.judge, goal.prices)
                pattern = lightened[base].within(budget)
                if pattern is not None and pattern not in found:
                    found.append(pattern)
            return self._checked(found, budget, problem)

        outcome = find_each(problem, ranked)
        problem.notice(f"measured {len(costs)} segments of layers, and blocks of queries on {len(lightened)} patterns")
        return Outcome(outcome.patterns, rivals=outcome.rivals, plain=plain)

    def _checked(self, patterns: Sequence[Pattern], budget: float, problem: Problem) -> list[Pattern]:
        """`patterns`, and what changes of a layer or a swap make of the best, all run on all sequences, best first."""
        judge, prices, native = problem.judge, problem.goal.prices, problem.goal.native
        most = _most_full(problem.goal)
        losses = dict(zip(patterns, judge.losses(patterns), strict=True))
        for _ in range(ROUNDS):
            best = min(losses, key=lambda pattern: (losses[pattern], pattern.letters))
            near = [item for item in _neighbours(best, prices, native) if item not in losses]
            near = [item for item in near if cost(item, prices) <= budget + 1e-9 and len(item.full_layers) <= most]
            if not near:
                break
            tried = judge.scout(near, native)
            order = sorted(range(len(near)), key=lambda at: (tried[at].mean, at))[:TRIED]
            winner = near[order[judge.choose([near[at] for at in order], native).best]]
            [losses[winner]] = judge.losses([winner])
            if losses[winner] >= losses[best]:
                break
        return sorted(losses, key=lambda pattern: (losses[pattern], pattern.letters))


def _most_full(goal: Goal) -> int:
    """`F` layers that a pattern has at most."""
    return len(goal.native.full_layers) if goal.most_full is None else goal.most_full


def _counts(budget: int, most: int) -> list[int]:
    """Numbers of `F` layers that are looked at for `budget`."""
    return sorted({min(most, math.ceil(times * budget)) for times in DENSER})


def _neighbours(pattern: Pattern, prices: Mapping[int, float], native: Pattern) -> Iterator[Pattern]:
    """Patterns of which a layer has another number of queries, or is `F` or `S` instead, or an `F` and an `S` trade."""
    single = [
        pattern.selecting_for(layer, queries)
        for layer, now in pattern.queries.items()
        for queries in prices
        if queries != now
    ]
    single += [pattern.share(layer) for layer in pattern.full_layers if layer != 0]
    shared = [layer for layer in pattern.shared_layers if native[layer] == native.letter]
    single += [pattern.unshare(layer).selecting_for(layer, queries) for layer in shared for queries in prices]
    yield from dict.fromkeys(single)
    for layer in pattern.full_layers[1:]:
        for other in shared:
            yield pattern.share(layer).unshare(other).selecting_for(other, pattern.queries[layer])
