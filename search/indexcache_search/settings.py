"""What a search is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from indexcache_search.errors import SearchError
from indexcache_search.objectives import Objective
from indexcache_search.strategies import DEFAULT_STRATEGY, STRATEGIES
from indexcache_search.strategies.base import Goal, Strategy
from indexcache_search.strategies.lazy import Lazy
from indexcache_search.strategies.priced import Priced
from indexcache_search.strategies.prices import PRICE_CONTEXT, Prices
from indexcache_search.strategies.swaps import Swapping
from sglang_indexcache import SparseModel
from sglang_indexcache.indexers import EXACT_ROWS, MOST_CANDIDATES, QUERIES
from sglang_indexcache.pattern import full_layer_count


@dataclass(frozen=True)
class Settings:
    """What a search is asked to do.

    Attributes:
        retain: retentions wanted; the first is the pattern file's default.
        strategy: a name among `STRATEGIES`.
        blocks: parts that block-wise greedy divides the layers into; 1 is Algorithm 1.
        candidates: flips that a lazy step evaluates at least.
        race: compare patterns on growing shares of the sequences, where the strategy does that at all.
        swaps: swaps that local search tries a round; 0 for no local search.
        objective: what is minimised.
        queries: for how many prompt queries at a time an `F` layer may select; see `strategies.priced`.
        rescore: among how many times index_topk candidates a layer may choose.
        price_context: prompt tokens at which these are priced.
        decode_retain: share of layers that are `F` at most in such patterns; `None` for all.
        seed: decides the order of the calibration data.
    """

    retain: tuple[Fraction, ...]
    strategy: str = DEFAULT_STRATEGY
    blocks: int = 1
    candidates: int = 1
    race: bool = True
    swaps: int = 0
    objective: Objective = "kl"
    seed: int = 0
    queries: tuple[int, ...] = ()
    rescore: tuple[int, ...] = ()
    price_context: int = PRICE_CONTEXT
    decode_retain: Fraction | None = None

    @property
    def races(self) -> bool:
        """Whether patterns are compared on growing shares of the sequences."""
        return self.race and STRATEGIES[self.strategy].races

    def chosen_strategy(self) -> Strategy:
        """The strategy, and local search behind it if that is asked for.

        Raises:
            SearchError: if there is no such strategy.
        """
        strategy = STRATEGIES.get(self.strategy)
        if strategy is None:
            raise SearchError(f"--strategy is {self.strategy}, expected one of {', '.join(STRATEGIES)}")
        if self.blocks > 1 and not strategy.takes_blocks:
            raise SearchError(f"--blocks {self.blocks} needs --strategy greedy, found {self.strategy}")
        if self._flag:
            if self.strategy != Lazy.name or self.swaps:
                raise SearchError(f"{self._flag} needs --strategy lazy, without --swaps")
            return Priced()
        return Swapping(strategy, self.swaps) if self.swaps else strategy

    def goal(self, model: SparseModel) -> Goal:
        """What the strategy is asked for on `model`; checked, before anything expensive.

        Raises:
            SearchError: if a retention can't be reached, or a search would not end.
        """
        full_layers = {retention: full_layer_count(model.num_layers, retention) for retention in self.retain}
        goal = Goal(
            native=model.native,
            full_layers=full_layers,
            blocks=self.blocks,
            candidates=self.candidates,
            prices=self._prices(model),
            most_full=self._most_full(model, full_layers),
        )
        self.chosen_strategy().check(goal)
        return goal

    @property
    def _flag(self) -> str | None:
        """Which flag lets indexers score less, if any does."""
        return "--queries" if self.queries else "--rescore" if self.rescore else None

    def _prices(self, model: SparseModel) -> Prices | None:
        """See `Goal.prices`."""
        if self._flag is None:
            return None
        if model.native.selection is not None:
            raise SearchError(f"{self._flag} is about indexers, the model is dense")
        for queries in self.queries:
            if queries not in QUERIES or queries > model.index_topk:
                most = max(item for item in QUERIES if item <= max(2, model.index_topk))
                raise SearchError(f"--queries has {queries}, expected {', '.join(map(str, QUERIES))}, at most {most}")
        for count in self.rescore:
            if not 2 <= count <= MOST_CANDIDATES:
                raise SearchError(f"--rescore has {count}, expected 2 to {MOST_CANDIDATES}")
        if self.price_context <= EXACT_ROWS:
            raise SearchError(f"--price-context is {self.price_context}, expected more than {EXACT_ROWS}")
        return Prices.at(self.price_context, model.index_topk, self.queries, self.rescore)

    def _most_full(self, model: SparseModel, full_layers: Mapping[Fraction, int]) -> int | None:
        """See `Goal.most_full`."""
        if self.decode_retain is None:
            return None
        if self._flag is None:
            raise SearchError(
                "--decode-retain is about patterns with --queries or --rescore, without which --retain says it"
            )
        most = full_layer_count(model.num_layers, self.decode_retain)
        for retention, count in full_layers.items():
            if count > most:
                raise SearchError(
                    f"--decode-retain is {self.decode_retain}, expected no less than --retain {retention}"
                )
        return most
