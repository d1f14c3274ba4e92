"""A stand-in for a model, on which an estimate runs a search: losses and times are like those measured."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.searching.begin import Begun
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import SHARED

_WEIGHT, _SPREAD = -5.67, 2.05  # logarithm of a layer's cost in nats a token, of the demo (docs/evidence/search.md)
_DIFFERENCE = 0.5  # by which a layer's cost differs from sequence to sequence, likewise
_ALIKE = 0.03  # evaluations' weight of: a layer that shares takes what one takes that selects


@dataclass(frozen=True)
class Pace:
    """Seconds of one sequence: of a layer that selects, of one that shares, and of all else, such as the loss."""

    full: float
    shared: float
    rest: float

    @classmethod
    def fitted(cls, evaluations: Sequence[Evaluation], seq_len: int) -> Pace:
        """Fit to evaluations, each of which counts the same; what these can't tell apart costs the same."""
        counts = np.array([_counts(item, seq_len) for item in evaluations], dtype=np.float64)
        seconds = np.array([max(item.seconds, 1e-6) for item in evaluations])
        layer = seconds.sum() / counts[:, :2].sum()
        alike = np.array([[-1.0, 1.0, 0.0]]) * _ALIKE / layer
        found, _ = nnls(np.vstack([counts / seconds[:, None], alike]), np.append(np.ones(len(seconds)), 0.0))
        return cls(*map(float, found))

    def of(self, evaluation: Evaluation, seq_len: int) -> float:
        """Return the seconds of an evaluation."""
        full, shared, rows = _counts(evaluation, seq_len)
        return self.full * full + self.shared * shared + self.rest * rows


def _counts(evaluation: Evaluation, seq_len: int) -> tuple[int, int, int]:
    """Return how many layers of either kind an evaluation ran, the last ones of each sequence, and its sequences."""
    pattern, full, shared = evaluation.pattern.pattern, 0, 0
    assert pattern is not None  # a search has no other plans
    for layer_tokens in evaluation.layer_tokens:
        ran = min(layer_tokens // seq_len, len(pattern))
        own = pattern.roles[len(pattern) - ran :].count(SHARED)
        full, shared = full + ran - own, shared + own
    return full, shared, len(evaluation.rows)


class StandIn:
    """A model whose losses are sums of its layers' costs, and whose evaluations take the measured time.

    Args:
        begun: the search; what its journal has was measured.
        known: the evaluations there of the tokens that choose.
        pace: what they take.
        seed: of what was not measured.
        until: when evaluations raise `TimeoutError`, by `time.monotonic`.

    Attributes:
        seconds: of all its evaluations.
    """

    def __init__(
        self, begun: Begun, known: Sequence[Evaluation], pace: Pace, seed: int = 0, until: float = math.inf
    ) -> None:
        self._begun, self._native, self._pace = begun, begun.engine.model.native, pace
        self._seed, self._until, self.seconds = seed, until, 0.0
        whole = begun.engine.model.num_layers * begun.calibration.seq_len
        self._reuses = any(min(item.layer_tokens) < whole for item in known)  # layers below the first difference
        self._seen: dict[tuple[str, int], set[str]] = {}  # beginnings of patterns by token set and row
        for item in known:
            assert item.pattern.pattern is not None
            list(self._layers(item.pattern.pattern, begun.calibration, item.rows))
        self._costs: dict[str, NDArray[np.float64]] = {}

    def evaluate(
        self,
        patterns: Sequence[Pattern],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """Evaluate as `Evaluates.evaluate` says."""
        chosen = list(range(data.num_sequences) if rows is None else rows)
        if data.sha256 not in self._costs:
            self._costs[data.sha256] = self._draw(data)
        costs, tokens = self._costs[data.sha256], data.scored.sum(axis=1)
        base = tokens.astype(np.float64)
        if data is self._begun.calibration:
            own_losses = self._known(self._native)
            assert own_losses is not None
            base[list(own_losses.rows)] = own_losses.losses
        for pattern in patterns:
            own = [layer for layer in pattern.shared_layers if layer not in self._native.shared_layers]
            distances = np.array([layer - pattern.source_layers[layer] for layer in own], dtype=np.float64)
            losses = base + tokens * (distances @ costs[own] if own else 0.0)
            evaluation = Evaluation(
                pattern=pattern,
                rows=tuple(chosen),
                losses=tuple(losses[chosen].tolist()),
                correct=(0,) * len(chosen),
                tokens=tuple(tokens[chosen].tolist()),
                layer_tokens=tuple(layers * data.seq_len for layers in self._layers(pattern, data, chosen, fresh)),
                seconds=0.0,
            )
            if time.monotonic() > self._until:
                raise TimeoutError
            seconds = self._pace.of(evaluation, data.seq_len)
            self.seconds += seconds
            yield replace(evaluation, seconds=seconds)

    def _known(self, pattern: Pattern) -> Evaluation | None:
        return self._begun.journal.evaluation("calibration", pattern)

    def _layers(self, pattern: Pattern, data: TokenSet, rows: Sequence[int], fresh: bool = False) -> Iterator[int]:
        """Yield how many layers run for each of `rows`: those from the first that no earlier pattern shares."""
        beginnings = [pattern.beginning(layers + 1) for layers in range(len(pattern) if self._reuses else 0)]
        for row in rows:
            earlier = self._seen.setdefault((data.sha256, row), set())
            shared = 0 if fresh else bisect_left(beginnings, True, key=lambda item: item not in earlier)
            earlier.update(beginnings)
            yield max(1, len(pattern) - shared)

    def _draw(self, data: TokenSet) -> NDArray[np.float64]:
        """Return each layer's cost a token on each sequence, `[layers, sequences]`: measured, or like what was."""
        rng, count, base = np.random.default_rng(self._seed), len(self._native), self._known(self._native)
        means = np.exp(_WEIGHT + _SPREAD * rng.standard_normal(count))
        flips = {layer: self._known(self._native.share(layer)) for layer in self._native.full_layers[1:]}
        measured = {
            layer: (sum(flip.losses) - sum(base.on(flip.rows).losses)) / sum(flip.tokens)
            for layer, flip in flips.items()
            if flip is not None and base is not None
        }
        for layer in range(count):
            if measured:
                means[layer] = measured.get(layer, rng.choice(list(measured.values())))
        noise = rng.standard_normal((count, data.num_sequences))
        return np.asarray(means[:, None] * np.exp(_DIFFERENCE * noise - _DIFFERENCE**2 / 2))


class Draft(Journal):
    """A copy of a journal's evaluations, which is in memory alone and goes its own way."""

    def __init__(self, journal: Journal) -> None:
        self._evaluations, self.records = dict(journal._evaluations), journal.records

    def _append(self, record: Mapping[str, Any]) -> None:
        """Write nothing."""
