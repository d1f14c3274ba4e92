"""What indexers cost that score less than every key for every query."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sglang_indexcache import Pattern
from sglang_indexcache.indexers import EXACT_ROWS

PRICE_CONTEXT = 131072
GATHERED = 3.5
"""What a candidate's score takes, in scores of keys that lie in order: 2.83 ms for 8,192 keys where all 128K take 12.7
(8,192 queries, float8, 32 heads, one H100; kernels/indexcache_kernels/candidate_topk/README.md)."""
SELECTING = 0.11
"""What an `F` layer takes longer for each index_topk that it selects: 18.2 ms for four times as many, for 12.7."""


def price(queries: int, context: int) -> float:
    """What an `F` layer costs that selects for `queries` prompt queries at a time, relative to one that does not.

    Scores are counted: query t of a prompt of `context` tokens scores t keys, a block's leader once for all of them;
    the last `EXACT_ROWS` queries score for themselves.
    """
    exact = 1 - (1 - EXACT_ROWS / context) ** 2
    return exact + (1 - exact) / queries


def candidate_price(candidates: int, index_topk: int, context: int) -> float:
    """What a `C` layer costs: query t scores min(t, candidates x index_topk) keys, which are gathered."""
    most = min(context, GATHERED * candidates * index_topk)
    return most * (2 * context - most) / context**2


@dataclass(frozen=True, kw_only=True)
class Prices:
    """In `F` layers that score every key for each query.

    Attributes:
        queries: of an `F` layer, by how many prompt queries select together; with 1 for those that do for themselves.
        candidates: of a `C` layer, by its candidates.
        selecting: what an `F` layer costs more from which `C` layers choose so many.
    """

    queries: Mapping[int, float]
    candidates: Mapping[int, float] = field(default_factory=dict)
    selecting: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def at(cls, context: int, index_topk: int, queries: Iterable[int], candidates: Iterable[int]) -> Prices:
        """In prompts of `context` tokens."""
        counts = sorted(set(candidates))
        return cls(
            queries={1: 1.0, **{number: price(number, context) for number in sorted(set(queries))}},
            candidates={count: candidate_price(count, index_topk, context) for count in counts},
            selecting={count: SELECTING * count for count in counts},
        )

    def cost(self, pattern: Pattern) -> float:
        """What the indexers of `pattern` cost together."""
        rescored = [item for item in pattern.indexers if item.candidates]
        chosen_from: dict[int, int] = {}
        for item in rescored:
            scorer = pattern.scorer(item.layer)
            chosen_from[scorer] = max(item.candidates, chosen_from.get(scorer, 0))
        scoring = sum(self.queries[number] for number in pattern.queries.values())
        rescoring = sum(self.candidates[item.candidates] for item in rescored)
        return scoring + rescoring + sum(self.selecting[count] for count in chosen_from.values())
