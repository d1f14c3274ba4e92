"""Scores of two servers on the same documents: the difference, its interval, and whether it is a fall."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from indexcache_search.evaluation.estimates import CONFIDENCE, over
from sglang_indexcache.io.fields import Count, Finite

ALPHA = 0.05  # how often a gate is closed at most, over all scores together, for servers that are equal
FLIPS = 20_000  # of signs, at least
_AT_ONCE = 1 << 22  # drawn numbers held at a time
_SEED = 0
_ROUNDING = 1e-9


class Change(BaseModel):
    """Change of a score from the baseline's, paired by document.

    Attributes:
        documents: how many were answered.
        baseline: mean score of the baseline.
        score: mean score of the other server.
        change: `score - baseline`.
        low: lower end of the interval of `change`, of 95 %; `None` if the documents are too few for one.
        high: its upper end, likewise.
        fell: documents whose score fell.
        rose: documents whose score rose.
        p_value: of McNemar's exact test, that as many rise as fall; `None` where scores are not 0 or 1.
    """

    model_config = ConfigDict(frozen=True)

    documents: Count
    baseline: Finite
    score: Finite
    change: Finite
    low: Finite | None
    high: Finite | None
    fell: Count
    rose: Count
    p_value: Finite | None


def change(baseline: Sequence[float], other: Sequence[float]) -> Change:
    """Compare scores of the same documents, at least one, in the same order.

    Intervals of scores of 0 and 1 are those of Agresti and Min (2005), which half a document in each of the four cells
    keeps from being too narrow; others are by Student's t. McNemar's test is the exact one, binomial over the documents
    that differ (1947).
    """
    before, after = np.asarray(baseline, float), np.asarray(other, float)
    differences = after - before
    fell, rose = int((differences < 0).sum()), int((differences > 0).sum())
    binary = bool(np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all())
    low, high = _of_shares(fell, rose, len(differences)) if binary else _of_means(differences)
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


def _of_shares(fell: int, rose: int, documents: int) -> tuple[float, float]:
    down, up, count = fell + 0.5, rose + 0.5, documents + 2
    mean = (up - down) / count
    margin = CONFIDENCE * math.sqrt(down + up - (up - down) ** 2 / count) / count
    return max(-1.0, mean - margin), min(1.0, mean + margin)


def _of_means(differences: NDArray[np.float64]) -> tuple[float, float] | tuple[None, None]:
    found = over(differences)
    return (found.low, found.high) if math.isfinite(found.margin) else (None, None)


def _mcnemar(fell: int, rose: int) -> float:
    from scipy.stats import binomtest  # takes a second to import

    return float(binomtest(fell, fell + rose).pvalue) if fell + rose else 1.0


def worse_by(scores: Sequence[tuple[float, float]], higher_is_better: bool) -> NDArray[np.float64]:
    """Return by how much each document's score is worse than the baseline's, `[documents]`; of pairs, its own last."""
    falls: NDArray[np.float64] = -np.diff(np.asarray(scores, np.float64), axis=1)[:, 0]
    return falls if higher_is_better else -falls


def p_of_fall(worse: NDArray[np.float64], most: float, flips: int = FLIPS) -> float:
    """Return how likely so large a mean of `worse` is if scores get worse by `most` at most, by flipping signs.

    Of two equal servers each document's difference is as likely as its opposite, so that the test is exact for them
    whatever scores are, and with `most` above 0 rejects them even less (Fisher 1935; with random flips, Phipson and
    Smyth 2010). Where nothing is allowed and scores are 0 and 1, it is McNemar's test of one side.
    """
    shifted = worse - most
    sizes, counts = np.unique(np.abs(shifted).round(12), return_counts=True)  # equal ones are flipped by one binomial
    enough = float(shifted.sum()) - _ROUNDING * max(1.0, float(np.abs(shifted).sum()))
    rng, rows, reached = np.random.default_rng(_SEED), max(1, _AT_ONCE // len(sizes)), 0
    for start in range(0, flips, rows):
        kept = rng.binomial(counts, 0.5, (min(rows, flips - start), len(sizes)))
        reached += int(((2 * kept - counts) @ sizes >= enough).sum())
    return (1 + reached) / (1 + flips)


def p_of_falls(worse: Sequence[NDArray[np.float64]], most: float) -> list[float]:
    """Return `p_of_fall` of each score, corrected for their number.

    The correction is Holm's (1979), which holds whatever the scores have to do with each other.
    """
    number = len(worse)
    flips = max(FLIPS, math.ceil(10 * number / ALPHA))  # fewer could not reach what the correction leaves
    found = [p_of_fall(item, most, flips) for item in worse]
    corrected, largest = [1.0] * number, 0.0
    for rank, place in enumerate(sorted(range(number), key=found.__getitem__)):
        largest = max(largest, min(1.0, (number - rank) * found[place]))
        corrected[place] = largest
    return corrected


def fewest_documents(scores: int) -> int:
    """Return how many documents a score needs so that a fall of all of them shows among so many scores."""
    return math.ceil(math.log2(scores / ALPHA))
