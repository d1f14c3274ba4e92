"""The reference engine for dense models, with plans for keys beside patterns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from torch import Tensor

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Evaluation
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.evaluation.plan import Plan, order
from indexcache_search.lab.key_delta.plan import METHODS, KeyPlan
from indexcache_search.lab.key_delta.runs import KeyRuns
from sglang_indexcache import Pattern
from sglang_indexcache.errors import PatternError


class KeyEngine(TransformersEngine):
    """An engine that evaluates plans for keys, and patterns as usual."""

    @cached_property
    def runs(self) -> KeyRuns:
        """Outputs of the last plans, and costs of all plans."""
        return KeyRuns(self.torch_model, self._cache.limit)

    @staticmethod
    def parse(key: str) -> Plan:
        """See `TransformersEngine.parse`."""
        if key.partition("|")[0] not in METHODS:
            return Pattern.from_key(key)
        try:
            return KeyPlan.from_key(key)
        except SearchError as error:
            raise PatternError(str(error)) from None

    def evaluate(
        self,
        patterns: Sequence[Plan],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """See `Engine.evaluate`."""
        yield from super().evaluate(
            [plan for plan in patterns if isinstance(plan, Pattern)], data, objective, rows, fresh
        )
        asked = list(range(data.num_sequences) if rows is None else rows)
        for plan in sorted((plan for plan in patterns if isinstance(plan, KeyPlan)), key=order):
            yield self.evaluation(plan, partial(self._keys, plan, data), data, objective, asked)

    def _keys(self, plan: KeyPlan, data: TokenSet, rows: Sequence[int]) -> tuple[Tensor, int]:
        return self.runs.hidden(plan, rows, data), len(plan.values) * data.seq_len
