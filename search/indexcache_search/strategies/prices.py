"""Prices of indexers that select for blocks of prompt queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_indexcache import Pattern
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS

PRICE_CONTEXT = 131072


def price(queries: int, context: int) -> float:
    """Return the cost of an `F` layer that selects for `queries` prompt queries, relative to single queries.

    The unit is scored keys: query t of a prompt of `context` tokens scores t keys, and a block's leader scores once for
    its block. The last `EXACT_ROWS` queries score individually.
    """
    exact = 1 - (1 - EXACT_ROWS / context) ** 2
    return exact + (1 - exact) / queries


def prices_at(context: int, queries: Iterable[int]) -> dict[int, float]:
    """Return the price of each of `queries`, and 1 for layers that select for single queries."""
    return {1: 1.0, **{number: price(number, context) for number in sorted(set(queries))}}


def cost(pattern: Pattern, prices: Mapping[int, float]) -> float:
    """Add up the indexer costs of `pattern`, in units of `F` layers that score every key for each query."""
    return sum(prices[number] for number in pattern.queries.values())
