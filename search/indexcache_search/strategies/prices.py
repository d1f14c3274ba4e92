"""What indexers cost in a prompt that select for blocks of its queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_indexcache import Pattern
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS

PRICE_CONTEXT = 131072


def price(queries: int, context: int) -> float:
    """Count what an `F` layer costs that selects for `queries` prompt queries at a time, relative to one that does not.

    Scores are counted: query t of a prompt of `context` tokens scores t keys, a block's leader once for all of them;
    the last `EXACT_ROWS` queries score for themselves.
    """
    exact = 1 - (1 - EXACT_ROWS / context) ** 2
    return exact + (1 - exact) / queries


def prices_at(context: int, queries: Iterable[int]) -> dict[int, float]:
    """Price each of `queries`, and 1 for layers that select for each query by itself."""
    return {1: 1.0, **{number: price(number, context) for number in sorted(set(queries))}}


def cost(pattern: Pattern, prices: Mapping[int, float]) -> float:
    """Add up what the indexers of `pattern` cost, in `F` layers that score every key for each query."""
    return sum(prices[number] for number in pattern.queries.values())
