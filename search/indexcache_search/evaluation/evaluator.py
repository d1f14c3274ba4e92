"""Evaluations with memory: read from the journal if recorded, else run by the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import NonFiniteLossError
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluates, Evaluation
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.evaluation.plan import Plan


@dataclass(frozen=True)
class Cost:
    """Cost of evaluations.

    Attributes:
        evaluations: patterns evaluated on all sequences or a part of them.
        sequences: runs of one sequence under one pattern.
        layer_tokens: layers that ran x tokens.
        seconds: time of the engine.
    """

    evaluations: int
    sequences: int
    layer_tokens: int
    seconds: float


@dataclass
class Evaluator:
    """Evaluator of patterns on one token set, which runs each sequence at most once over all runs of a search.

    Attributes:
        part: the set's name in the journal.
        on_evaluation: called with every evaluation at its first request, run or recorded.
    """

    engine: Evaluates
    data: TokenSet
    objective: Objective
    journal: Journal
    part: str
    on_evaluation: Callable[[Evaluation], None] = field(default=lambda evaluation: None)

    def __post_init__(self) -> None:
        self._asked: dict[tuple[Plan, int], set[int]] = {}

    def evaluations(
        self, patterns: Sequence[Plan], rows: Sequence[int] | None = None, repeat: int = 0
    ) -> list[Evaluation]:
        """Evaluate `patterns` on `rows`, all by default; return results in order.

        `repeat` 1 evaluates afresh what `repeat` 0 recorded.

        Raises:
            NonFiniteLossError: if a loss is NaN or infinite.
        """
        asked = list(range(self.data.num_sequences) if rows is None else rows)
        missing: dict[tuple[int, ...], list[Plan]] = {}  # patterns by the rows they lack
        for pattern in dict.fromkeys(patterns):
            recorded = self.journal.evaluation(self.part, pattern, repeat)
            known = set() if recorded is None else set(recorded.rows)
            lacking = tuple(row for row in asked if row not in known)
            if recorded is not None and len(lacking) < len(asked):
                self._ask(recorded.on([row for row in asked if row in known]), repeat)
            if lacking:
                missing.setdefault(lacking, []).append(pattern)
        for lacking, group in missing.items():
            for evaluation in self.engine.evaluate(group, self.data, self.objective, lacking, fresh=repeat > 0):
                self._check_finite(evaluation)
                self.journal.add_evaluation(self.part, evaluation, repeat)
                self._ask(evaluation, repeat)
        return [self.recorded(pattern, repeat).on(asked) for pattern in patterns]

    def _ask(self, evaluation: Evaluation, repeat: int) -> None:
        asked = self._asked.setdefault((evaluation.pattern, repeat), set())
        new = [row for row in evaluation.rows if row not in asked]
        if new:
            asked.update(new)
            self.on_evaluation(evaluation.on(new))

    def recorded(self, pattern: Plan, repeat: int = 0) -> Evaluation:
        """Return the recorded evaluation of a pattern, on all sequences it was evaluated on.

        Raises:
            KeyError: if there is none.
        """
        evaluation = self.journal.evaluation(self.part, pattern, repeat)
        if evaluation is None:
            raise KeyError(f"{pattern} was not evaluated on {self.part}")
        return evaluation

    @property
    def cost(self) -> Cost:
        """Cost of all requested evaluations, including those that an earlier run recorded."""
        parts = [self.recorded(pattern, repeat).on(sorted(rows)) for (pattern, repeat), rows in self._asked.items()]
        return Cost(
            len(parts),
            sum(len(part.rows) for part in parts),
            sum(sum(part.layer_tokens) for part in parts),
            math.fsum(part.seconds for part in parts),
        )

    def _check_finite(self, evaluation: Evaluation) -> None:
        for row, value in zip(evaluation.rows, evaluation.losses, strict=True):
            if not math.isfinite(value):
                source = self.data.sources[self.data.source_of[row]]
                raise NonFiniteLossError(
                    f"loss is {value} on sequence {row} ({source}) with pattern {evaluation.pattern}; stopped:"
                    " check the checkpoint and --dtype (float16 overflows where bfloat16 does not)"
                )
