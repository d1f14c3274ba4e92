"""Compare patterns on all sequences, or by racing them over growing shares of the set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Self, TypeVar

import numpy as np

from indexcache_search.data.tokens import growing_shares
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.estimates import CONFIDENCE, Estimate, student
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.plan import Plan

P = TypeVar("P", bound=Plan)

FIRST_SHARE = 8  # the first share holds 1/8 of the sequences


@dataclass(frozen=True)
class Choice:
    """The best of several patterns.

    Attributes:
        best: its index among them.
        loss: its loss on all sequences.
        increases: each pattern's loss minus the reference's, on the sequences it was evaluated on.
    """

    best: int
    loss: float
    increases: list[float]


class Judge:
    """Comparison of patterns for a strategy.

    In a race all patterns first run on a small share of the sequences. The better half go on to a share twice as large,
    except those worse than the leader by more than a paired confidence bound, until all sequences are used. The winner
    has always run on all sequences.

    Args:
        evaluator: evaluates patterns on the calibration set.
        shares: growing sets of sequences, the last with all; by default that one alone, which is no race.
    """

    def __init__(self, evaluator: Evaluator, shares: Sequence[Sequence[int]] | None = None) -> None:
        self._evaluator, self._data = evaluator, evaluator.data
        self.shares = shares or [range(self._data.num_sequences)]

    @classmethod
    def racing(cls, evaluator: Evaluator) -> Self:
        """Create a judge whose first share holds 1/8 of the sequences."""
        return cls(evaluator, growing_shares(evaluator.data, math.ceil(evaluator.data.num_sequences / FIRST_SHARE)))

    @property
    def half(self) -> Sequence[int]:
        """The second to last share, about half of the sequences; all if there is only one."""
        return self.shares[max(0, len(self.shares) - 2)]

    def losses(self, patterns: Sequence[Plan]) -> list[float]:
        """Return mean losses on all sequences."""
        return [estimates.loss(item, self._data).mean for item in self._evaluator.evaluations(patterns)]

    def choose(self, patterns: Sequence[Plan], reference: Plan) -> Choice:
        """Return the best of different `patterns`, ties to the first; increases are over `reference`."""
        alive = list(range(len(patterns)))
        increases = [math.inf] * len(patterns)
        for number, rows in enumerate(self.shares):
            base = self._evaluator.evaluations([reference], rows)[0]
            evaluations = dict(
                zip(alive, self._evaluator.evaluations([patterns[at] for at in alive], rows), strict=True)
            )
            for at in alive:
                increases[at] = estimates.increase(evaluations[at], base, self._data).mean
            alive.sort(key=lambda at: (increases[at], at))
            if number + 1 < len(self.shares):
                leader = patterns[alive[0]]
                half = alive[: math.ceil(len(alive) / 2)]
                alive = [at for at in half if not self.clearly_worse(patterns[at], leader, rows)]
        best = alive[0]
        return Choice(best, estimates.loss(evaluations[best], self._data).mean, increases)

    def scout(self, patterns: Sequence[Plan], reference: Plan, rows: Sequence[int] | None = None) -> list[Estimate]:
        """Estimate increases of `patterns` over `reference` on `rows` alone, by default the first share."""
        rows = self.shares[0] if rows is None else rows
        base = self._evaluator.evaluations([reference], rows)[0]
        evaluations = self._evaluator.evaluations(patterns, rows)
        return [estimates.increase(item, base, self._data) for item in evaluations]

    def ranked(self, patterns: Sequence[P], reference: Plan, rows: Sequence[int] | None = None) -> dict[P, float]:
        """Rank different `patterns` by the increases of `scout`, lowest first; ties stay in order."""
        increases = [item.mean for item in self.scout(patterns, reference, rows)]
        return dict(sorted(zip(patterns, increases, strict=True), key=itemgetter(1)))

    def informative_rows(self, pattern: Plan, reference: Plan) -> list[int]:
        """Return the most informative rows for patterns near `pattern`, which runs on all sequences.

        These are the first share, which shows losses, and as many others on which `pattern` costs most over
        `reference`, which show gains.
        """
        rows, data = self.shares[-1], self._data
        first, second = self._evaluator.evaluations([pattern, reference], rows)
        sequences = np.bincount(data.source_of[rows])  # each source counts the same, and each sequence of it
        excess = {
            row: (mine - other) / max(tokens, 1) / sequences[data.source_of[row]]
            for row, mine, other, tokens in zip(rows, first.losses, second.losses, first.tokens, strict=True)
        }
        others = sorted(set(rows) - set(self.shares[0]), key=lambda row: (-excess[row], row))
        return sorted([*self.shares[0], *others[: len(self.shares[0])]])

    def difference(self, pattern: Plan, other: Plan, rows: Sequence[int] | None = None) -> Estimate:
        """Return how much more `pattern` costs than `other`, paired, on `rows`, by default all sequences."""
        first, second = (self._evaluator.evaluations([item], rows)[0] for item in (pattern, other))
        return estimates.increase(first, second, self._data)

    def noise(self, pattern: Plan, reference: Plan) -> float:
        """Return the standard error of the difference of two patterns on all sequences; 0 if unknown."""
        return self.difference(pattern, reference).stderr or 0.0

    def clearly_worse(self, pattern: Plan, leader: Plan, rows: Sequence[int]) -> bool:
        """Return true if `pattern` costs more than `leader` on `rows` by more than a paired confidence bound."""
        difference = self.difference(pattern, leader, rows)
        if difference.stderr is None:
            return False
        return difference.mean > student(CONFIDENCE, difference.degrees) * difference.stderr
