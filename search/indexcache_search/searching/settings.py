"""Settings of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from indexcache_search.errors import SearchError
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.strategies.base import BudgetRequest, Goal, Strategy, TimeGoal
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.pricing import priced, table_of
from indexcache_search.strategies.budget.search import BudgetSearch
from indexcache_search.strategies.lazy import Lazy
from sglang_indexcache import ModelLayers
from sglang_indexcache.pattern import full_layer_count

BLOCKS = (2, 4, 8, 16)  # sizes of blocks that a search tries; 64 is hardly faster than 16


@dataclass(frozen=True)
class Budget:
    """A time that a pattern may take, relative to the checkpoint's own.

    Attributes:
        share: of the time.
        context: tokens of the prompts.
        table: name or file of a latency table; `None` for that of the model, see `pricing`.
    """

    share: float
    context: int
    table: str | None = None

    def prices(self, model: ModelLayers, queries: Sequence[int] = ()) -> Prices:
        """Return the latencies by which it is met.

        Raises:
            SearchError: if there is no table of the model's shape, or the context or one of `queries` was not measured.
        """
        table = table_of(model, self.table)
        if table is None:
            raise SearchError(
                f"no latency table is known for {model.architecture}, expected prices=, a table or a file"
            )
        prices = priced(model, table, self.context)
        for number in queries:
            if prices.has_blocks and number not in prices.full:
                known = ", ".join(str(item) for item in prices.full if item > 1)
                raise SearchError(f"--prefill: queries has {number}, but {table.name} has times of {known}")
        return prices


@dataclass(frozen=True, kw_only=True)
class TimeBudget(BudgetRequest):
    """A prefill time that a pattern may take, which may have blocks of queries.

    Attributes:
        prefill: the time.
        queries: sizes of blocks.
        decode: a time of decoding steps that it may take; by the table of `prefill` where it names none.
    """

    option = "--prefill"
    strategy = BudgetSearch

    prefill: Budget
    queries: tuple[int, ...] = BLOCKS
    decode: Budget | None = None

    def goal(self, model: ModelLayers) -> TimeGoal:
        """See `BudgetRequest.goal`."""
        if model.dense:
            raise SearchError("--prefill is about indexers, the model is dense")
        queries = tuple(sorted({number for number in self.queries if number <= model.index_topk}))
        if not queries:
            raise SearchError(f"--prefill: queries of at most {model.index_topk} were expected, as the model selects")
        prices = self.prefill.prices(model, queries)
        return TimeGoal(
            share=self.prefill.share,
            prices=prices,
            queries=queries if prices.has_blocks else (),
            most_full=self._most_full(model),
        )

    def _most_full(self, model: ModelLayers) -> int:
        """Return the most `F` layers with which decoding takes no longer than it may."""
        native = model.native
        most = len(native.full_layers)
        if self.decode is None:
            return most
        prices = replace(self.decode, table=self.decode.table or self.prefill.table).prices(model)
        for count in range(most, 0, -1):
            if prices.decode_share(native.keeping(native.full_layers[:count]), native) <= self.decode.share:
                return count
        least = prices.decode_share(native.keeping(native.full_layers[:1]), native)
        raise SearchError(f"--decode is {self.decode.share:g}, expected at least {least:.3f}: what one F layer takes")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a search, before the model is known.

    Attributes:
        retain: retentions to search; the first is the pattern file's default, unless there is a budget.
        strategy: how patterns are found; with a budget its own.
        objective: what is minimised.
        budget: within which a further pattern is found.
    """

    retain: tuple[Fraction, ...]
    strategy: Strategy = field(default_factory=Lazy)
    objective: Objective = "kl"
    budget: BudgetRequest | None = None

    def goal(self, model: ModelLayers) -> Goal:
        """Return the goal of the search on `model`, checked before anything expensive.

        Raises:
            SearchError: if it can't be reached, or a search would not end.
        """
        full_layers = {retention: full_layer_count(model.num_layers, retention) for retention in self.retain}
        budget = None if self.budget is None else self.budget.goal(model)
        goal = Goal(native=model.native, full_layers=full_layers, budget=budget)
        self.strategy.check(goal)
        return goal
