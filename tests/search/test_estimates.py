"""Means, standard errors and paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.losses import Losses


def token_set(source_of: list[int]) -> TokenSet:
    shape = (len(source_of), 4)
    names = tuple(f"s{index}" for index in range(max(source_of) + 1))
    tokens = np.arange(4 * len(source_of), dtype=np.int32).reshape(shape)
    return TokenSet(tokens, np.ones(shape, np.bool_), np.asarray(source_of), names)


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


def test_copies_of_a_sequence_are_one_observation() -> None:
    """A file with its rows twice would seem to know twice as much; all rows the same, everything."""
    once = token_set([0] * 3)
    twice = TokenSet(*(np.repeat(item, 2, axis=0) for item in (once.tokens, once.scored, once.source_of)), ("s0",))
    values, tokens = [10.0, 40.0, 70.0], [10] * 3
    first = estimates.loss(evaluation(values, tokens), once)
    second = estimates.loss(evaluation(sorted(values * 2), tokens * 2), twice)
    assert (second.mean, second.stderr, second.degrees) == (first.mean, pytest.approx(first.stderr), 2)
    same = TokenSet(*(np.repeat(item[:1], 8, axis=0) for item in (once.tokens, once.scored, once.source_of)), ("s0",))
    found = estimates.loss(evaluation([50.0] * 8, [10] * 8), same)
    assert (found.mean, found.stderr, found.low, found.high) == (5.0, None, -math.inf, math.inf)


def test_intervals_of_few_sequences_are_students() -> None:
    found = estimates.loss(evaluation([10.0, 30.0], [10] * 2), token_set([0] * 2))
    assert (found.mean, found.stderr, found.degrees) == (2.0, pytest.approx(1.0), 1)
    assert found.high - found.mean == pytest.approx(13.97, abs=0.01) == found.mean - found.low  # two errors of many
    assert estimates.Estimate(1.0, 0.1).high == math.inf  # as in files from before degrees were written


def test_an_interval_of_three_sequences_misses_the_truth_one_time_in_twenty() -> None:
    """By two standard errors it would miss one time in five."""
    rng = np.random.default_rng(12)
    data, tokens, missed, narrow = token_set([0] * 3), [1] * 3, 0, 0
    for _ in range(2_000):
        found = estimates.loss(evaluation(rng.normal(1.0, 1.0, 3).tolist(), tokens), data)
        missed += not found.low <= 1.0 <= found.high
        narrow += abs(found.mean - 1.0) > 2 * (found.stderr or 0.0)
    assert missed / 2_000 < 0.06 and narrow / 2_000 > 0.15


@pytest.mark.parametrize("first", [2, 3, 4, 16])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_a_mean_over_sources_is_off_one_time_in_twenty_though_one_has_few(first: int, spread: float) -> None:
    """With the degrees of freedom of all sources together it would be, one time in four at 2 and 30 sequences."""
    rng = np.random.default_rng(100 + first)
    data, tokens, missed, rounds = token_set([0] * first + [1] * (32 - first)), [1] * 32, 0, 2_000
    for _ in range(rounds):
        values = np.concatenate([rng.normal(1.0, spread, first), rng.normal(1.0, 1.0, 32 - first)])
        found = estimates.loss(evaluation(values.tolist(), tokens), data)
        missed += not found.low <= 1.0 <= found.high
        assert min(first - 1, 31 - first) <= found.degrees <= 30
    assert missed / rounds < 0.065


def test_degrees_of_freedom_of_sources_that_do_not_differ_are_the_fewest() -> None:
    data, tokens = token_set([0] * 4 + [1] * 6), [1] * 10
    assert estimates.loss(evaluation([2.0] * 10, tokens), data).degrees == 3
    assert estimates.loss(evaluation([math.nan, *range(9)], tokens), data).degrees == 3  # as of a broken server
    even = estimates.loss(evaluation([1.0, 2.0, 3.0, 4.0] * 2, tokens[:8]), token_set([0] * 4 + [1] * 4))
    assert even.degrees == 6


@pytest.mark.parametrize(("number", "settled"), [(2, False), (5, False), (6, True)])
def test_equal_values_are_evidence_if_they_are_many(number: int, settled: bool) -> None:
    """They have no spread, which says nothing of the spread that others would have."""
    data = token_set([0] * number)
    lost = estimates.share(np.full(number, -1.0), evaluation([0.0] * number, [8] * number), data)
    assert (lost.high < 0) == settled and math.isfinite(lost.margin) == settled
    nothing = estimates.share(np.zeros(number), evaluation([0.0] * number, [8] * number), data)
    assert (nothing.low, nothing.high) == (0.0, 0.0)
