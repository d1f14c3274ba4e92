"""Scores of two servers on the same documents: the difference, its interval, and McNemar's test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from sglang_indexcache.files.fields import Count, Finite

RESAMPLES = 10_000
CONFIDENCE = 0.95
_AT_ONCE = 1 << 22  # resampled scores held at a time
_SEED = 0


class Change(BaseModel):
    """Change of a score from the baseline's, paired by document.

    Attributes:
        documents: how many were answered.
        baseline: mean score of the baseline.
        score: mean score of the other server.
        change: `score - baseline`.
        low: lower end of the interval of `change`, by bootstrap over documents.
        high: its upper end.
        fell: documents whose score fell.
        rose: documents whose score rose.
        p_value: of McNemar's exact test, that as many rise as fall; `None` where scores are not 0 or 1.
    """

    model_config = ConfigDict(frozen=True)

    documents: Count
    baseline: Finite
    score: Finite
    change: Finite
    low: Finite
    high: Finite
    fell: Count
    rose: Count
    p_value: Finite | None


def change(baseline: Sequence[float], other: Sequence[float]) -> Change:
    """Compare scores of the same documents, at least one, in the same order.

    The interval is the percentile bootstrap's (Efron and Tibshirani 1993), with a fixed seed; McNemar's test is the
    exact one, binomial over the documents that differ (1947).
    """
    before, after = np.asarray(baseline, float), np.asarray(other, float)
    differences = after - before
    fell, rose = int((differences < 0).sum()), int((differences > 0).sum())
    low, high = _interval(differences)
    binary = bool(np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all())
    return Change(
        documents=len(differences),
        baseline=float(before.mean()),
        score=float(after.mean()),
        change=float(differences.mean()),
        low=low,
        high=high,
        fell=fell,
        rose=rose,
        p_value=_mcnemar(fell, rose) if binary else None,
    )


def _interval(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    rng, count = np.random.default_rng(_SEED), len(differences)
    rows = max(1, _AT_ONCE // count)
    means = [
        differences[rng.integers(0, count, (min(rows, RESAMPLES - start), count))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def _mcnemar(fell: int, rose: int) -> float:
    from scipy.stats import binomtest  # takes a second to import

    return float(binomtest(fell, fell + rose).pvalue) if fell + rose else 1.0
