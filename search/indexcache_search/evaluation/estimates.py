"""Estimates from per-sequence sums: a mean and its standard error.

A set's loss is the mean over its sources of the mean over their sequences of the loss per scored token. With one source
of packed text that is the paper's per-token loss. With several, each source counts the same, and so does each sequence
of a source, since a mean over tokens would hardly show the effect on short answers. Standard errors are over sequences.
Differences are paired, since every pattern sees the same sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Losses


@dataclass(frozen=True)
class Estimate:
    """Mean and its standard error over sequences; `stderr` is `None` if there are too few."""

    mean: float
    stderr: float | None


def loss(evaluation: Losses, data: TokenSet, source: int | None = None) -> Estimate:
    """Return the loss per scored token, of all sources or of one."""
    return _mean(np.asarray(evaluation.losses), evaluation, data, source)


def increase(evaluation: Losses, baseline: Losses, data: TokenSet, source: int | None = None) -> Estimate:
    """Return the loss per scored token above the baseline's, paired by sequence."""
    return _mean(np.asarray(evaluation.losses) - np.asarray(baseline.losses), evaluation, data, source)


def share(counts: NDArray[np.float64], evaluation: Losses, data: TokenSet, source: int | None = None) -> Estimate:
    """Return `counts` per sequence, such as `evaluation.correct`, as a share of the scored tokens."""
    return _mean(counts, evaluation, data, source)


def _mean(sums: NDArray[np.float64], evaluation: Losses, data: TokenSet, source: int | None) -> Estimate:
    """Average `sums` per scored token; skip sequences without scored tokens, and sources without sequences."""
    tokens, source_of = np.asarray(evaluation.tokens), data.source_of[list(evaluation.rows)]
    values, source_of = sums[tokens > 0] / tokens[tokens > 0], source_of[tokens > 0]
    numbers = sorted(set(source_of.tolist())) if source is None else [source]
    parts = [_of_source(values[source_of == number]) for number in numbers]
    mean = math.fsum(part.mean for part in parts) / len(parts)
    known = [part.stderr for part in parts if part.stderr is not None]
    if len(known) < len(parts):
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(math.fsum(error**2 for error in known)) / len(known))


def _of_source(values: NDArray[np.float64]) -> Estimate:
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(math.fsum((values - mean) ** 2) / (count * (count - 1))))
