"""Evaluations with memory: journal first, engine else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from indexcache_search import objectives
from indexcache_search.engines.base import Engine, Evaluation, Objective
from indexcache_search.errors import NonFiniteLossError
from indexcache_search.journal import Journal
from indexcache_search.tokens import TokenSet
from sglang_indexcache import Pattern


@dataclass
class Evaluator:
    """Evaluates patterns on one token set, each at most once over all runs of a search.

    Attributes:
        part: the set's name in the journal.
        on_evaluation: told of every evaluation asked for, whether it was run or recorded.
    """

    engine: Engine
    data: TokenSet
    objective: Objective
    journal: Journal
    part: str
    on_evaluation: Callable[[Evaluation], None] = field(default=lambda evaluation: None)

    def evaluations(self, patterns: Sequence[Pattern], repeat: int = 0) -> list[Evaluation]:
        """Evaluations of `patterns`, in order; `repeat` 1 evaluates afresh what `repeat` 0 recorded.

        Raises:
            NonFiniteLossError: if a loss is NaN or infinite.
        """
        found: dict[str, Evaluation] = {}
        for pattern in patterns:
            recorded = self.journal.evaluation(self.part, pattern, repeat)
            if recorded is not None and pattern.roles not in found:
                found[pattern.roles] = recorded
                self.on_evaluation(recorded)
        missing = [Pattern(roles) for roles in dict.fromkeys(item.roles for item in patterns) if roles not in found]
        for evaluation in self.engine.evaluate(missing, self.data, self.objective):
            self._check_finite(evaluation)
            self.journal.add_evaluation(self.part, evaluation, repeat)
            found[evaluation.pattern.roles] = evaluation
            self.on_evaluation(evaluation)
        return [found[pattern.roles] for pattern in patterns]

    def recorded(self, pattern: Pattern, repeat: int = 0) -> Evaluation:
        """An evaluation that was made before.

        Raises:
            KeyError: if it was not.
        """
        found = self.journal.evaluation(self.part, pattern, repeat)
        if found is None:
            raise KeyError(f"{pattern} was not evaluated on {self.part}")
        return found

    def losses(self, patterns: Sequence[Pattern]) -> list[float]:
        """Mean losses of `patterns`, in order: what strategies ask for."""
        return [objectives.loss(evaluation, self.data).mean for evaluation in self.evaluations(patterns)]

    def _check_finite(self, evaluation: Evaluation) -> None:
        for index, value in enumerate(evaluation.losses):
            if not math.isfinite(value):
                source = self.data.sources[self.data.source_of[index]]
                raise NonFiniteLossError(
                    f"loss is {value} on sequence {index} ({source}) with pattern {evaluation.pattern}; stopped:"
                    " check the checkpoint and --dtype (float16 overflows where bfloat16 does not)"
                )
