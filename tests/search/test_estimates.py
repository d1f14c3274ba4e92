"""Means, standard errors and paired differences."""

from __future__ import annotations

import numpy as np
import pytest

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Losses
from indexcache_search.evaluation import estimates


def token_set(source_of: list[int]) -> TokenSet:
    shape = (len(source_of), 4)
    names = tuple(f"s{index}" for index in range(max(source_of) + 1))
    return TokenSet(np.zeros(shape, np.int32), np.ones(shape, np.bool_), np.asarray(source_of), names)


def evaluation(losses: list[float], tokens: list[int]) -> Losses:
    return Losses(rows=tuple(range(len(losses))), losses=tuple(losses), tokens=tuple(tokens))


def test_one_source_of_packed_text_is_the_per_token_mean() -> None:
    estimate = estimates.loss(evaluation([10.0, 40.0], [20, 20]), token_set([0, 0]))
    assert estimate.mean == pytest.approx(50 / 40)


def test_sequences_weigh_the_same_however_many_tokens_they_score() -> None:
    data = token_set([0, 0, 0])
    estimate = estimates.loss(evaluation([10.0, 40.0, 600.0], [10, 20, 200]), data)
    assert (estimate.mean, estimate.stderr) == (pytest.approx(2.0), pytest.approx(1 / np.sqrt(3)))
    assert estimates.loss(evaluation([10.0, 40.0, 0.0], [10, 20, 0]), data).mean == pytest.approx(1.5)


def test_sources_weigh_the_same_however_many_tokens_they_score() -> None:
    estimate = estimates.loss(evaluation([100.0, 100.0, 6.0], [100, 100, 2]), token_set([0, 0, 1]))
    assert estimate.mean == pytest.approx((1.0 + 3.0) / 2)
    assert estimates.loss(evaluation([1.0, 6.0], [1, 2]), token_set([0, 1]), source=1).mean == pytest.approx(3.0)


def test_equal_lengths_give_the_textbook_standard_error() -> None:
    values = [1.0, 2.0, 4.0, 7.0]
    estimate = estimates.loss(evaluation([10 * value for value in values], [10] * 4), token_set([0] * 4))
    assert estimate.stderr == pytest.approx(np.std(values, ddof=1) / 2)


def test_differences_are_paired() -> None:
    """Sequences differ wildly, the two patterns by the same amount on each: no error is left."""
    data, tokens = token_set([0] * 4), [10] * 4
    baseline = evaluation([10.0, 200.0, 3000.0, 5.0], tokens)
    other = evaluation([11.0, 201.0, 3001.0, 6.0], tokens)
    estimate = estimates.increase(other, baseline, data)
    assert (estimate.mean, estimate.stderr) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))
    assert estimates.loss(other, data).stderr > 50


def test_one_sequence_has_no_standard_error() -> None:
    assert estimates.loss(evaluation([1.0], [2]), token_set([0])).stderr is None
    assert estimates.loss(evaluation([1.0, 2.0, 3.0], [2, 2, 2]), token_set([0, 1, 1])).stderr is None
