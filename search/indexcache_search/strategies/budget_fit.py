"""Fit one pattern's indexers into a budget by making layers select in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from sglang_indexcache import Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting

if TYPE_CHECKING:
    from indexcache_search.evaluation.judge import Judge

UNITS = 512  # knapsack units per price of an `F` layer


class BudgetFit:
    """Search for the blocks that make one pattern fit a budget at the least loss.

    First every layer is tried with every block size on the first share of the sequences. An exact knapsack picks
    blocks, and its picks are measured on up to half of the sequences, until all are. Some blocks cost something only on
    rare sequences: if a pick costs more than its blocks together, they are also tried on those sequences.

    Args:
        pattern: pattern of `F` and `S`.
        judge: evaluates on growing shares of the sequences.
        prices: cost of an `F` layer by the number of queries per selection.
    """

    def __init__(self, pattern: Pattern, judge: Judge, prices: Mapping[int, float]) -> None:
        self._pattern, self._judge = pattern, judge
        self._enough = judge.shares.index(judge.half)
        self._units = {number: math.ceil(price * UNITS - 1e-6) for number, price in prices.items()}
        self._costs: dict[IndexerSetting, float] = {}
        self._shares: dict[IndexerSetting, int] = {}
        self._blocks = {
            layer: [IndexerSetting(layer=layer, queries=number) for number in prices if number > 1]
            for layer in pattern.full_layers
        }
        self._measure([block for blocks in self._blocks.values() for block in blocks])

    def within(self, budget: float) -> Pattern | None:
        """Return the pattern with the least expected loss for at most `budget`; `None` if there is none."""
        while True:
            picked = self._picked(budget)
            if picked is None:
                return None
            rough = [block for block in picked if self._shares[block] < self._enough]
            if not rough:
                return with_blocks(self._pattern, picked)
            least = min(self._shares[block] for block in rough)
            self._measure([block for block in rough if self._shares[block] == least])

    def expected(self, pattern: Pattern) -> float:
        """Return the loss of `pattern` on all sequences if the costs of its blocks add up."""
        [alone] = self._judge.losses([self._pattern])
        return alone + sum(self._costs[block] for block in pattern.indexers)

    def look_again(self, pattern: Pattern) -> None:
        """Measure the blocks of `pattern` on the rows where it costs most; elsewhere they can't cost much."""
        rows = self._judge.informative_rows(pattern, self._pattern)
        share = len(rows) / len(self._judge.shares[-1])
        patterns = [with_blocks(self._pattern, [block]) for block in pattern.indexers]
        for block, estimate in zip(pattern.indexers, self._judge.scout(patterns, self._pattern, rows), strict=True):
            self._costs[block] = max(self._costs[block], share * estimate.mean)

    def _measure(self, blocks: list[IndexerSetting]) -> None:
        """Measure blocks on the share after the last one they were measured on."""
        share = self._shares.get(blocks[0], -1) + 1
        patterns = [with_blocks(self._pattern, [block]) for block in blocks]
        estimates = self._judge.scout(patterns, self._pattern, self._judge.shares[share])
        for block, estimate in zip(blocks, estimates, strict=True):
            self._costs[block], self._shares[block] = estimate.mean, share

    def _picked(self, budget: float) -> list[IndexerSetting] | None:
        """Solve the knapsack exactly, with prices rounded up to one part in `UNITS`."""
        room = math.floor(budget * UNITS + 1e-6)
        least = np.zeros(room + 1)  # loss by available units
        choices = []
        for blocks in self._blocks.values():
            losses = np.full((1 + len(blocks), room + 1), np.inf)
            for row, (units, loss) in zip(losses, self._kinds(blocks), strict=True):
                if units <= room:
                    row[units:] = least[: room + 1 - units] + loss
            choices.append(losses.argmin(axis=0))
            least = losses.min(axis=0)
        if not np.isfinite(least[room]):
            return None
        picked = []
        for blocks, choice in zip(reversed(self._blocks.values()), reversed(choices), strict=True):
            number = int(choice[room])
            room -= self._kinds(blocks)[number][0]
            picked += blocks[number - 1 : number] if number else []
        return picked

    def _kinds(self, blocks: list[IndexerSetting]) -> list[tuple[int, float]]:
        """Return units and loss of a layer that selects for single queries, then of each of its `blocks`."""
        return [(self._units[1], 0.0), *((self._units[block.queries], self._costs[block]) for block in blocks)]


def with_blocks(pattern: Pattern, blocks: Iterable[IndexerSetting]) -> Pattern:
    """Make layers of `pattern` select in these blocks."""
    for block in blocks:
        pattern = pattern.selecting_for(block.layer, block.queries)
    return pattern
