"""From per-sequence sums to one number, and how sure it is.

A set's loss is the mean over its sources of the mean loss per scored token. With one source that is the paper's
per-token loss; with several, each source counts the same, however many tokens of it are scored. Standard errors are
over sequences (ratio estimator); differences are paired, since every pattern sees the same sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Evaluation


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error over sequences; `stderr` is None where one sequence allows none."""

    mean: float
    stderr: float | None


def loss(evaluation: Evaluation, data: TokenSet, source: int | None = None) -> Estimate:
    """Mean loss per scored token, of all sources or of one."""
    return _ratio(np.asarray(evaluation.losses), evaluation, data, source)


def increase(evaluation: Evaluation, baseline: Evaluation, data: TokenSet, source: int | None = None) -> Estimate:
    """Mean loss per scored token above the baseline's, paired by sequence."""
    return _ratio(np.asarray(evaluation.losses) - np.asarray(baseline.losses), evaluation, data, source)


def share(counts: NDArray[np.float64], evaluation: Evaluation, data: TokenSet, source: int | None = None) -> Estimate:
    """`counts` per sequence as a share of the scored tokens, for instance of `evaluation.correct`."""
    return _ratio(counts, evaluation, data, source)


def _ratio(sums: NDArray[np.float64], evaluation: Evaluation, data: TokenSet, source: int | None) -> Estimate:
    """Of `sums` to scored tokens, on the sequences of `evaluation`; sources that have none of them do not count."""
    tokens, source_of = np.asarray(evaluation.tokens), data.source_of[list(evaluation.rows)]
    numbers = sorted(set(source_of.tolist())) if source is None else [source]
    parts = [_source_ratio(sums[source_of == number], tokens[source_of == number]) for number in numbers]
    mean = math.fsum(ratio.mean for ratio in parts) / len(parts)
    errors = [ratio.stderr for ratio in parts]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(math.fsum(error**2 for error in known)) / len(known))


def _source_ratio(sums: NDArray[np.float64], tokens: NDArray[np.int64]) -> Estimate:
    count = len(sums)
    ratio = math.fsum(sums) / int(tokens.sum())
    if count < 2:
        return Estimate(ratio, None)
    residuals = sums - ratio * tokens
    return Estimate(ratio, math.sqrt(math.fsum(residuals**2) / (count * (count - 1))) / float(tokens.mean()))
