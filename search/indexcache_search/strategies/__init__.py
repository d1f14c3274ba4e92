"""Strategies by name; the first is the default. Add a new one as a module here and a line below."""

from __future__ import annotations

from typing import Any

from indexcache_dense.strategies.page_search import PageSearch
from indexcache_dense.strategies.recall import Recall
from indexcache_dense.strategies.shift import Shift
from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import Strategy
from indexcache_search.strategies.budget.search import BudgetSearch
from indexcache_search.strategies.exhaustive import Exhaustive
from indexcache_search.strategies.greedy import Greedy
from indexcache_search.strategies.lazy import Lazy
from indexcache_search.strategies.measured import MeasuredStrategy
from indexcache_search.strategies.similarity import Similarity
from indexcache_search.strategies.uniform import Uniform

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Lazy, Greedy, Exhaustive, Uniform, Similarity, Shift, Recall)
}
DEFAULT_STRATEGY = next(iter(STRATEGIES))
DEFAULT_RETAIN = "1/2,1/4,1/8"  # of a search and of a comparison


def strategy_of(
    name: str = DEFAULT_STRATEGY, *, in_time: bool = False, in_bytes: bool = False, **settings: Any
) -> Strategy:
    """Return a strategy with its settings; `in_time` or `in_bytes` if a pattern within these is looked for, too.

    Raises:
        KeyError: if there is no such strategy.
        TypeError: if it has no such setting, see `Strategy.settings`.
        SearchError: if it can't look for one.
    """
    if not in_time and not in_bytes:
        return STRATEGIES[name](**settings)
    kind, option = (BudgetSearch, "--prefill") if in_time else (PageSearch, "--bytes")
    if name != kind.name or settings.pop("swaps", 0):
        raise SearchError(f"{option} needs --strategy {kind.name}, without swaps")
    return kind(**settings)


def measured_strategies(dense: bool) -> list[MeasuredStrategy]:
    """Return the strategies that derive patterns from a measurement, for dense models or for others."""
    return [item() for item in STRATEGIES.values() if issubclass(item, MeasuredStrategy) and item.dense == dense]
