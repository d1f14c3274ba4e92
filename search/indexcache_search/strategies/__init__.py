"""Strategies by name; the first is the default. Add a new one as a module here and a line below."""

from __future__ import annotations

from indexcache_search.strategies.base import Strategy
from indexcache_search.strategies.budget_search import BudgetSearch
from indexcache_search.strategies.exhaustive import Exhaustive
from indexcache_search.strategies.greedy import Greedy
from indexcache_search.strategies.lazy import Lazy
from indexcache_search.strategies.measured import MeasuredStrategy
from indexcache_search.strategies.recall import Recall
from indexcache_search.strategies.shift import Shift
from indexcache_search.strategies.similarity import Similarity
from indexcache_search.strategies.uniform import Uniform

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (Lazy(), Greedy(), Exhaustive(), Uniform(), Similarity(), Shift(), Recall())
}
DEFAULT_STRATEGY = next(iter(STRATEGIES))
WITH_PRICES: dict[str, Strategy] = {Lazy.name: BudgetSearch()}
"""Strategies for patterns with blocks of queries, by the name of the strategy whose flips they follow."""


def measured_strategies(dense: bool) -> list[MeasuredStrategy]:
    """Return the strategies that derive patterns from a measurement, for dense models or for others."""
    return [item for item in STRATEGIES.values() if isinstance(item, MeasuredStrategy) and item.dense == dense]
