"""Shares of the products of queries with keys that plans leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Evaluation
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.evaluation.plan import Plan
from indexcache_search.lab.key_delta.engine import KeyEngine
from indexcache_search.lab.key_delta.plan import Stage
from indexcache_search.lab.key_delta.runs import KeyRuns, in_stage, read_tokens


class Costs:
    """Counts of the products of queries with keys that plans leave out, in reading or in decoding.

    `part` precedes the stage in the journal.

    Attributes:
        stage: reading or decoding.
        counted: `[sequences, tokens]`, the tokens in that stage.
        rows: sequences with such tokens.
    """

    def __init__(self, engine: KeyEngine, data: TokenSet, journal: Journal, stage: Stage, part: str = "") -> None:
        self.stage, self.counted, self._data = stage, in_stage(read_tokens(data), stage), data
        self.rows = [int(row) for row in np.flatnonzero(self.counted.any(axis=1))]
        self._evaluator = Evaluator(_Counting(engine.runs, stage), data, "nll", journal, f"{part}{stage}")

    def skipped(self, plan: Plan) -> Estimate:
        """Return the share of the products that `plan` leaves out."""
        done = self._evaluator.evaluations([plan], self.rows)[0]
        computed = estimates.loss(done, self._data)
        return Estimate(1.0 - computed.mean, computed.stderr)


class _Counting:
    """An engine whose losses are the products computed, and whose tokens are those of attention to everything."""

    def __init__(self, runs: KeyRuns, stage: Stage) -> None:
        self._runs, self._stage = runs, stage

    def evaluate(
        self,
        patterns: Sequence[Plan],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """See `Engine.evaluate`."""
        rows = range(data.num_sequences) if rows is None else rows
        for plan in patterns:
            pairs = [self._runs.work(plan, row, data, self._stage) for row in rows]
            none = (0,) * len(rows)
            computed, everything = tuple(float(pair[0]) for pair in pairs), tuple(pair[1] for pair in pairs)
            yield Evaluation(
                pattern=plan,
                rows=tuple(rows),
                losses=computed,
                correct=none,
                tokens=everything,
                layer_tokens=none,
                seconds=0.0,
            )


def main_stage(data: TokenSet) -> Stage:
    """Return the stage of the majority of tokens."""
    return "reading" if read_tokens(data).mean() >= 0.5 else "decoding"
