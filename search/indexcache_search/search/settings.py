"""Settings of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from indexcache_search.errors import SearchError
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.strategies.base import Goal, Strategy
from indexcache_search.strategies.lazy import Lazy
from indexcache_search.strategies.prices import PRICE_CONTEXT, prices_at
from sglang_indexcache import ModelLayers
from sglang_indexcache.pattern import full_layer_count
from sglang_indexcache.pattern.indexer_setting import QUERIES


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a search, before the model is known.

    Attributes:
        retain: retentions to search; the first is the pattern file's default.
        strategy: how patterns are found; `BudgetSearch` with `queries`.
        objective: what is minimised.
        queries: for how many prompt queries at a time an `F` layer may select; see `strategies.budget_search`.
        price_context: prompt tokens at which these are priced.
        decode_retain: share of layers that are `F` at most in such patterns; `None` for all.
    """

    retain: tuple[Fraction, ...]
    strategy: Strategy = field(default_factory=Lazy)
    objective: Objective = "kl"
    queries: tuple[int, ...] = ()
    price_context: int = PRICE_CONTEXT
    decode_retain: Fraction | None = None

    def goal(self, model: ModelLayers) -> Goal:
        """Return the goal of the search on `model`, checked before anything expensive.

        Raises:
            SearchError: if a retention can't be reached, or a search would not end.
        """
        full_layers = {retention: full_layer_count(model.num_layers, retention) for retention in self.retain}
        goal = Goal(
            native=model.native,
            full_layers=full_layers,
            prices=self._prices(model),
            most_full=self._most_full(model, full_layers),
        )
        self.strategy.check(goal)
        return goal

    def _prices(self, model: ModelLayers) -> dict[int, float]:
        """See `Goal.prices`."""
        if not self.queries:
            return {}
        if model.dense:
            raise SearchError("--queries is about indexers, the model is dense")
        for queries in self.queries:
            if queries not in QUERIES or queries > model.index_topk:
                most = max(item for item in QUERIES if item <= max(2, model.index_topk))
                raise SearchError(f"--queries has {queries}, expected {', '.join(map(str, QUERIES))}, at most {most}")
        return prices_at(self.price_context, self.queries)

    def _most_full(self, model: ModelLayers, full_layers: Mapping[Fraction, int]) -> int | None:
        """See `Goal.most_full`."""
        if self.decode_retain is None:
            return None
        if not self.queries:
            raise SearchError("--decode-retain is about patterns with --queries, without which --retain says it")
        most = full_layer_count(model.num_layers, self.decode_retain)
        for retention, count in full_layers.items():
            if count > most:
                raise SearchError(
                    f"--decode-retain is {self.decode_retain}, expected no less than --retain {retention}"
                )
        return most
