"""Estimates from per-sequence sums: a mean and its standard error.

A set's loss is the mean over its sources of the mean over their sequences of the loss per scored token. With one source
of packed text that is the paper's per-token loss. With several, each source counts the same, and so does each sequence
of a source, since a mean over tokens would hardly show the effect on short answers. Standard errors are over sequences.
Differences are paired, since every pattern sees the same sequences. Copies of a sequence are one observation.

How far a mean may be off is said here alone, by Student's t: every verdict asks `Estimate.low` and `Estimate.high`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.losses import Losses

CONFIDENCE = 2.0  # standard errors, of many sequences, within which a mean is known: 95 % of the time, on both sides
EQUAL = 6  # observations that are all the same and not 0 say that the mean is not: as unlikely as 2 / 2**6 = 3 %
_TRUSTED = 3  # degrees of freedom of a source from which on its spread counts, where several are averaged
_ROUNDING = 1e-9  # share of a mean by which values differ that are meant to be the same


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences, and how well it is known.

    Attributes:
        mean: the mean.
        stderr: its standard error; `None` if there are too few sequences.
        degrees: degrees of freedom of `stderr`: of one source, sequences that differ, less one; 0 if unknown.
    """

    mean: float
    stderr: float | None
    degrees: int = 0

    @property
    def margin(self) -> float:
        """Half width of the 95 % interval of the mean; infinite if nothing says how far it may be off.

        A few values that are all the same have no spread to estimate one from. Only 0 is believed: a plan that changes
        nothing changes nothing anywhere.
        """
        if self.stderr is None or self.degrees < 1:
            return math.inf
        if abs(self.mean) > 0 and self.stderr <= _ROUNDING * abs(self.mean) and self.degrees + 1 < EQUAL:
            return math.inf
        return student(CONFIDENCE, self.degrees) * self.stderr

    @property
    def low(self) -> float:
        """Lower end of the interval of 95 %."""
        return self.mean - self.margin

    @property
    def high(self) -> float:
        """Upper end of the interval of 95 %."""
        return self.mean + self.margin


@lru_cache(maxsize=1024)
def student(z: float, degrees: int) -> float:
    """Return the quantile of Student's t at the level of normal quantile `z`; infinite without degrees of freedom."""
    from scipy.special import ndtr, stdtrit  # as scipy.stats, which takes a second to import

    return float(stdtrit(degrees, ndtr(z))) if degrees > 0 else math.inf


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
    tokens, rows = np.asarray(evaluation.tokens), np.asarray(evaluation.rows)
    values, rows = sums[tokens > 0] / tokens[tokens > 0], rows[tokens > 0]
    source_of, copies = data.source_of[rows], data.copy_of[rows]
    numbers = sorted(set(source_of.tolist())) if source is None else [source]
    parts = [over(values[source_of == number], copies[source_of == number]) for number in numbers]
    mean = math.fsum(part.mean for part in parts) / len(parts)
    known = [part.stderr for part in parts if part.stderr is not None]
    if len(known) < len(parts):
        return Estimate(mean, None)
    error = math.sqrt(math.fsum(error**2 for error in known)) / len(known)
    return Estimate(mean, error, _together(known, [part.degrees for part in parts]))


def _together(errors: Sequence[float], degrees: Sequence[int]) -> int:
    """Return the degrees of freedom of a mean over sources, rounded down: by Welch and Satterthwaite.

    Their approximation trusts how little a few sequences happen to differ. So where a source has fewer than four, that
    source's own count, the least that is possible.
    """
    least, most = min(degrees), max(errors)
    if len(degrees) == 1 or least < _TRUSTED or not 0 < most < math.inf:
        return least
    variances = [(error / most) ** 2 for error in errors]
    parts = math.fsum(variance**2 / number for variance, number in zip(variances, degrees, strict=True))
    return math.floor(math.fsum(variances) ** 2 / parts + _ROUNDING)


def over(values: NDArray[np.float64], copies: NDArray[np.int64] | None = None) -> Estimate:
    """Return the mean of observations of one kind.

    Args:
        values: `[observations]`.
        copies: `[observations]`; those with the same number are copies of each other, and one observation together.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    off: dict[int, float] = {}
    for number, value in zip(range(count) if copies is None else copies.tolist(), values, strict=True):
        off[number] = off.get(number, 0.0) + float(value - mean)
    different = len(off)
    if different < 2:
        return Estimate(mean, None)
    squares = math.fsum(item**2 for item in off.values())
    return Estimate(mean, math.sqrt(squares / (count * count * (different - 1) / different)), different - 1)
