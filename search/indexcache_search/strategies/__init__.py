"""Strategies by name; add a new one as a module here and a name in `_OWN`, or by an entry point of an extension."""

from __future__ import annotations

from functools import cache
from typing import Any

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import BudgetRequest, Strategy
from indexcache_search.strategies.exhaustive import Exhaustive
from indexcache_search.strategies.greedy import Greedy
from indexcache_search.strategies.lazy import Lazy
from indexcache_search.strategies.measured import MeasuredStrategy
from indexcache_search.strategies.similarity import Similarity
from indexcache_search.strategies.uniform import Uniform
from sglang_indexcache.io.extensions import ExtensionError, extensions

_OWN: tuple[type[Strategy], ...] = (Lazy, Greedy, Exhaustive, Uniform, Similarity)
DEFAULT_STRATEGY = Lazy.name
DEFAULT_RETAIN = "1/2,1/4,1/8"  # of a search and of a comparison


@cache
def strategies() -> dict[str, type[Strategy]]:
    """Return the strategies of this package by name, and those of the extensions of `indexcache.strategies`.

    Raises:
        ExtensionError: if an extension can't be loaded, or does not have the name of its entry point, or another has.
    """
    found = {strategy.name: strategy for strategy in _OWN}
    for entry, strategy in extensions("strategies", Strategy).items():
        name = getattr(strategy, "name", None)
        if name != entry or name in found:
            expected = "another name" if name in found else entry
            raise ExtensionError(f"extension {entry} of indexcache.strategies: its name is {name}, expected {expected}")
        found[entry] = strategy
    return found


def strategy_of(name: str = DEFAULT_STRATEGY, *, budget: BudgetRequest | None = None, **settings: Any) -> Strategy:
    """Return a strategy with its settings; with a `budget` one that looks for a pattern within it, too.

    Raises:
        KeyError: if there is no such strategy.
        TypeError: if it has no such setting, see `Strategy.settings`.
        SearchError: if it can't look for one.
    """
    if budget is None:
        return strategies()[name](**settings)
    if name != budget.strategy.name or settings.pop("swaps", 0):
        raise SearchError(f"{budget.option} needs --strategy {budget.strategy.name}, without swaps")
    return budget.strategy(**settings)


def measured_strategies(dense: bool) -> list[MeasuredStrategy]:
    """Return the strategies that derive patterns from a measurement, for dense models or for others."""
    return [item() for item in strategies().values() if issubclass(item, MeasuredStrategy) and item.dense == dense]
