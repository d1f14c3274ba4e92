"""Losses of patterns on tokens, and who evaluates them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.evaluation.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Sums over the scored tokens of each sequence, from which estimates are made.

    Attributes:
        rows: the sequences' rows in their token set.
        losses: float64 sum per sequence: negative log-likelihood in nats (`nll`), or KL(baseline || pattern) over the
            whole vocabulary (`kl`).
        tokens: scored tokens per sequence.
        correct: tokens per sequence that greedy decoding would get right; empty if not counted.
    """

    rows: tuple[int, ...]
    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    correct: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluation(Losses):
    """Losses of one plan on some sequences, and their cost.

    Attributes:
        pattern: the plan that ran.
        layer_tokens: layers that ran x tokens, per sequence.
        seconds: wall time of all sequences.
    """

    pattern: Plan
    layer_tokens: tuple[int, ...]
    seconds: float

    def on(self, rows: Sequence[int]) -> Evaluation:
        """Return the part of some sequences, with a proportional part of the seconds.

        Raises:
            KeyError: if one was not evaluated.
        """
        index_of = {row: index for index, row in enumerate(self.rows)}
        at = [index_of[row] for row in rows]
        columns: dict[str, Any] = {name: tuple(getattr(self, name)[index] for index in at) for name in COLUMNS}
        return replace(self, rows=tuple(rows), seconds=self.seconds * len(at) / len(self.rows), **columns)

    def __add__(self, other: Evaluation) -> Evaluation:
        """Join this evaluation with one of other sequences under the same pattern."""
        columns: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in ("rows", *COLUMNS)}
        return replace(self, seconds=self.seconds + other.seconds, **columns)


COLUMNS = ("losses", "correct", "tokens", "layer_tokens")


class Evaluates(Protocol):
    """Evaluator of plans on tokens."""

    def evaluate(
        self,
        patterns: Sequence[Any],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """Evaluate different `patterns` on `data`; yield each as it is done, in any order.

        Args:
            patterns: patterns of letters, or other plans that it supports.
            data: the token set.
            objective: the loss to sum.
            rows: sequences of `data` to run, in this order; all by default.
            fresh: reuse no state of earlier evaluations.
        """
        ...
