"""Fit one pattern into a prompt's time by making layers select in blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from indexcache_search.strategies.base import TimeGoal
from sglang_indexcache import Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

UNITS = 1 << 14  # knapsack units of the time of a prompt of the checkpoint's own pattern
UNKNOWN = -1


class BudgetFit:
    """Search for the blocks that make one pattern fit a time at the least loss.

    The largest block of every layer is tried on the first share of the sequences; costs of smaller ones are guessed
    from it. An exact knapsack picks blocks, and its picks are measured on growing shares, up to a quarter of the
    sequences, until all are. Some blocks cost something only on rare sequences: if a pick costs more than its blocks
    together, they are also tried on those sequences.

    Args:
        pattern: pattern of `F` and `S`.
        judge: evaluates on growing shares of the sequences.
        goal: times of layers, and the sizes of blocks.
        native: the checkpoint's own pattern.
        guides: fits of other patterns from which costs are guessed, the most similar first; without any the largest
            blocks are measured.
    """

    def __init__(
        self, pattern: Pattern, judge: Judge, goal: TimeGoal, native: Pattern, guides: Sequence[BudgetFit] = ()
    ) -> None:
        self.pattern, self._judge, self._goal = pattern, judge, goal
        self._enough = max(0, len(judge.shares) - 3)  # about a quarter of the sequences
        unit = goal.prices.prompt_ms(native) / UNITS
        self._room = math.floor((goal.share * UNITS * unit - goal.prices.rest) / unit + 1e-6)
        self._sizes = [1, *goal.queries]
        self._reused = Counter(pattern.source_layers)
        self._units = {
            (layer, queries): math.ceil(goal.prices.group(queries, self._reused[layer] - 1) / unit - 1e-6)
            for layer in pattern.full_layers
            for queries in self._sizes
        }
        self._costs: dict[IndexerSetting, float] = {}
        self._shares: dict[IndexerSetting, int] = {}
        for guide in guides:
            self._guess_from(guide)
        if not guides and goal.queries:
            self._measure([IndexerSetting(layer=layer, queries=self._sizes[-1]) for layer in pattern.full_layers])

    @staticmethod
    def possible(pattern: Pattern, goal: TimeGoal, native: Pattern) -> bool:
        """Return whether blocks can make `pattern` fit."""
        largest = max(goal.queries, default=1)
        settings = [IndexerSetting(layer=layer, queries=largest) for layer in pattern.full_layers if largest > 1]
        return goal.fits(with_blocks(pattern, settings), native)

    def guess(self) -> Pattern | None:
        """Return the pattern with the least loss that fits, by what is known now; `None` if none fits."""
        picked = self._picked()
        return None if picked is None else with_blocks(self.pattern, picked)

    def best(self) -> Pattern | None:
        """Return the pattern with the least expected loss that fits; `None` if none does."""
        while True:
            picked = self._picked()
            if picked is None:
                return None
            rough = [block for block in picked if self._shares.get(block, UNKNOWN) < self._enough]
            if not rough:
                return with_blocks(self.pattern, picked)
            least = min(self._shares.get(block, UNKNOWN) for block in rough)
            self._measure([block for block in rough if self._shares.get(block, UNKNOWN) == least])

    def expected(self, pattern: Pattern) -> float:
        """Return the loss of `pattern` on all sequences if the costs of its blocks add up."""
        [alone] = self._judge.losses([self.pattern])
        return alone + sum(map(self._cost, pattern.indexers))

    def look_again(self, pattern: Pattern) -> None:
        """Measure the blocks of `pattern` on the rows where it costs most; elsewhere they can't cost much."""
        rows = self._judge.informative_rows(pattern, self.pattern)
        share = len(rows) / len(self._judge.shares[-1])
        patterns = [with_blocks(self.pattern, [block]) for block in pattern.indexers]
        for block, estimate in zip(pattern.indexers, self._judge.scout(patterns, self.pattern, rows), strict=True):
            self._costs[block] = max(self._costs[block], share * estimate.mean)

    def _measure(self, blocks: list[IndexerSetting]) -> None:
        """Measure blocks on the share after the last one they were measured on."""
        share = self._shares.get(blocks[0], UNKNOWN) + 1
        patterns = [with_blocks(self.pattern, [block]) for block in blocks]
        estimates = self._judge.scout(patterns, self.pattern, self._judge.shares[share])
        for block, estimate in zip(blocks, estimates, strict=True):
            self._costs[block], self._shares[block] = estimate.mean, share

    def _guess_from(self, guide: BudgetFit) -> None:
        """Guess that a block's cost grows with the layers that reuse its selection."""
        unknown = set(self._reused) - {block.layer for block in self._costs}
        for block, cost in guide._costs.items():
            if block.layer in unknown:
                self._costs[block] = cost * self._reused[block.layer] / guide._reused[block.layer]

    def _cost(self, block: IndexerSetting) -> float:
        """Return the cost of a block, guessed in proportion to its queries from the next larger known one.

        Of a layer that was never tried, it is guessed to be that of the mean layer.
        """
        for queries in self._sizes[self._sizes.index(block.queries) :]:
            known = self._costs.get(IndexerSetting(layer=block.layer, queries=queries))
            if known is not None:
                return known * (block.queries - 1) / (queries - 1)
        largest = self._sizes[-1]
        costs = [cost for other, cost in self._costs.items() if other.queries == largest]
        return sum(costs) / max(1, len(costs)) * (block.queries - 1) / (largest - 1)

    def _picked(self) -> list[IndexerSetting] | None:
        """Solve the knapsack exactly, with times rounded up to one part in `UNITS`."""
        room = self._room
        if room < 0:
            return None
        least = np.zeros(room + 1)  # loss by available units
        choices = []
        for layer in self.pattern.full_layers:
            losses = np.full((len(self._sizes), room + 1), np.inf)
            for row, queries in zip(losses, self._sizes, strict=True):
                units = self._units[layer, queries]
                if units <= room:
                    cost = self._cost(IndexerSetting(layer=layer, queries=queries)) if queries > 1 else 0.0
                    row[units:] = least[: room + 1 - units] + cost
            choices.append(losses.argmin(axis=0))
            least = losses.min(axis=0)
        if not np.isfinite(least[room]):
            return None
        picked = []
        for layer, choice in zip(reversed(self.pattern.full_layers), reversed(choices), strict=True):
            queries = self._sizes[int(choice[room])]
            room -= self._units[layer, queries]
            picked += [IndexerSetting(layer=layer, queries=queries)] if queries > 1 else []
        return picked


def with_blocks(pattern: Pattern, blocks: Iterable[IndexerSetting]) -> Pattern:
    """Make layers of `pattern` select in these blocks."""
    for block in blocks:
        pattern = pattern.selecting_for(block.layer, block.queries)
    return pattern
