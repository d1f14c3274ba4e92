"""indexcache-watch: the sequential test, on simulated streams."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from indexcache_watch.bets import LARGEST_CUT, LEAST_CUT, Bets
from indexcache_watch.drift import DriftTest

Changes = NDArray[np.float64]
ALLOWED, ALPHA, EDGES = 0.1, 0.005, (2048, 8192, 32768, 131072)
STREAMS, REQUESTS = 500, 2_000
SHAPE = (REQUESTS, STREAMS)
MOST = 0.0145  # alpha and three standard errors of as many streams


def first_alarms(changes: Changes, allowed: float = ALLOWED) -> Changes:
    """The request of the first alarm in each stream of one bucket of five; one too many where there is none."""
    bets, limit = Bets(allowed, changes.shape[1:]), np.log((len(EDGES) + 1) / ALPHA)
    first = np.full(changes.shape[1:], len(changes) + 1.0)
    for number, now in enumerate(changes, 1):
        bets.add(now)
        first = np.where((first > number) & (bets.log_evidence >= limit), number, first)
    return first


def alarms(changes: Changes, allowed: float = ALLOWED) -> float:
    share = float(np.mean(first_alarms(changes, allowed) <= len(changes)))
    print(f"alarms in {share:.1%} of {STREAMS} streams of {REQUESTS} requests, mean {changes.mean():+.3f}")
    return share


def rare(rng: np.random.Generator, one_in: int, change: float, mean: float = 0.0) -> Changes:
    """One of so many requests changes by `change`, the others by what makes the mean."""
    other = (mean - change / one_in) / (1 - 1 / one_in)
    return np.where(rng.random(SHAPE) < 1 / one_in, change, other)


def drifting(rng: np.random.Generator) -> Changes:
    """Traffic whose kind and spread change, between one end of what is allowed and the other."""
    share = np.linspace(0, 1, REQUESTS)[:, None]
    return ALLOWED * np.cos(40 * share) + rng.normal(size=SHAPE) * (0.02 + 0.6 * share)


def in_bursts(rng: np.random.Generator) -> Changes:
    """Spreads that follow each other: a large change is followed by large ones, of either sign."""
    spread, found = np.full(STREAMS, 0.3), np.empty(SHAPE)
    for row in found:
        row[:] = spread * rng.normal(size=STREAMS)
        spread = np.minimum(0.1 + 0.5 * spread + 0.5 * np.abs(row), 5.0)
    return found


NULL: dict[str, tuple[float, Callable[[np.random.Generator], Changes]]] = {
    "a wide spread": (0.1, lambda rng: rng.normal(0, 1.5, SHAPE)),
    "a wide spread, all that is allowed": (0.1, lambda rng: rng.normal(0.1, 1.5, SHAPE)),
    "its own replies": (0.1, lambda rng: rng.normal(-0.1, 0.2, SHAPE)),
    "1 of 50 loses 10": (0.1, lambda rng: rare(rng, 50, 10)),
    "1 of 50 gains 10": (0.1, lambda rng: rare(rng, 50, -10)),
    "1 of 20 loses 2, all that is allowed": (0.1, lambda rng: rare(rng, 20, 2, 0.1)),
    "1 of 20 changes by 4": (0.02, lambda rng: 4 * rng.choice([-1, 0, 1], SHAPE, p=[0.025, 0.95, 0.025])),
    "Student's t of 3": (0.02, lambda rng: rng.standard_t(3, SHAPE)),
    "Student's t of 3, all that is allowed": (0.1, lambda rng: 0.3 * rng.standard_t(3, SHAPE) + 0.1),
    "a long tail of losses": (0.1, lambda rng: np.exp(rng.normal(0, 1, SHAPE)) - np.exp(0.5)),
    "two points, all that is allowed": (0.1, lambda rng: 0.1 + rng.choice([-1.0, 1.0], SHAPE)),
    "one point, all that is allowed": (0.1, lambda rng: np.full(SHAPE, 0.1)),
    "drifting": (0.1, drifting),
    "in bursts": (0.1, in_bursts),
}


@pytest.mark.parametrize("name", NULL)
def test_false_alarms_are_as_rare_as_promised(name: str) -> None:
    """Cut off from below alone, wide and rare changes of mean 0 raise an alarm in nearly every stream."""
    allowed, stream = NULL[name]
    assert alarms(stream(np.random.default_rng(1)), allowed) <= MOST


def test_false_alarms_of_all_buckets_together_are_as_rare() -> None:
    """One-sided, heavy and at the edge of what is allowed, in each of five buckets."""
    changes = 0.3 * np.random.default_rng(7).standard_t(3, (REQUESTS, STREAMS, 5)) + ALLOWED
    assert np.mean((first_alarms(changes) <= REQUESTS).any(axis=1)) <= MOST


def losing(rng: np.random.Generator) -> Changes:
    """Of four requests one asks for what the pattern can't find any more; the others hardly change."""
    return np.where(rng.random(SHAPE) < 0.25, rng.normal(1.2, 0.8, SHAPE), rng.normal(0.03, 0.1, SHAPE))


ALTERNATIVES: dict[str, tuple[int, Callable[[np.random.Generator], Changes]]] = {
    # the median of the requests after which the statistic before this one, cut off at -1 alone, raised its alarm
    "no spread": (63, lambda rng: rng.normal(0.3, 0, SHAPE)),
    "spread 0.2": (67, lambda rng: rng.normal(0.3, 0.2, SHAPE)),
    "spread 0.5": (119, lambda rng: rng.normal(0.3, 0.5, SHAPE)),
    "spread 0.75": (202, lambda rng: rng.normal(0.3, 0.75, SHAPE)),
    "one of four": (98, losing),
    "one of four, its own replies": (98, lambda rng: -losing(rng)),
    "Student's t of 3": (100, lambda rng: 0.3 * rng.standard_t(3, SHAPE) + 0.3),
    "broken": (7, lambda rng: rng.normal(-4.2, 1.7, SHAPE)),
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_what_is_lost_is_found_in_no_more_than_twice_the_requests(name: str) -> None:
    before, stream = ALTERNATIVES[name]
    found = first_alarms(stream(np.random.default_rng(2)))
    print(f"{name}: after {np.median(found):.0f} requests, nine of ten after {np.quantile(found, 0.9):.0f}")
    assert np.median(found) <= 2 * before
    assert np.mean(found <= REQUESTS) > 0.99


def test_a_wide_spread_takes_no_more_than_twice_what_any_test_needs() -> None:
    """A likelihood ratio of both means, which knows the spread, needs log(1 / alpha) over the divergence."""
    found = first_alarms(np.random.default_rng(3).normal(0.3, 1.5, SHAPE))
    least = np.log((len(EDGES) + 1) / ALPHA) * 2 * 1.5**2 / (0.3 - ALLOWED) ** 2
    print(f"after {np.median(found):.0f} requests, a likelihood ratio after {least:.0f}")
    assert np.median(found) <= 2 * least


def test_what_begins_to_lose_later_is_found_as_well() -> None:
    """Stakes that remember all requests alike would need as many again as lost nothing."""
    changes = np.random.default_rng(4).normal(0, 0.5, SHAPE)
    changes[1000:] += 0.3
    found = first_alarms(changes)
    print(f"{np.median(found) - 1000:.0f} requests after it began")
    assert np.mean(found <= 1000) <= MOST and np.quantile(found, 0.9) < 1600


def test_no_change_takes_all_of_the_wealth_nor_more() -> None:
    """A stake above one over the cut would make wealth negative, and the bound void."""
    rng = np.random.default_rng(5)
    for allowed in (1e-4, 0.1, 10.0):
        bets = Bets(allowed, (50,))
        for _ in range(300):
            bets.add(np.where(rng.random(50) < 0.9, 5 * allowed + 0.5, -rng.choice([3.0, 1e3, 1e12], 50)))
            assert np.isfinite(bets.log_evidence).all()


@pytest.mark.parametrize("allowed", [0.1, 3.0, 10.0])
def test_a_change_of_four_times_what_is_allowed_is_found(allowed: float) -> None:
    """A cut below what is allowed would hide everything."""
    assert first_alarms(np.full((300, 1), 4 * allowed), allowed).max() <= 300


def test_cuts_grow_with_what_was_seen_on_their_side() -> None:
    bets = Bets(ALLOWED)
    seen = [(9.0, LEAST_CUT), (9.0, 9.0), (-4.0, -LEAST_CUT), (-99.0, -4.0), (-99.0, -LARGEST_CUT), (99.0, 9.0)]
    assert [float(bets.add(change)) for change, _ in seen] == [cut_off for _, cut_off in seen]


def test_a_bucket_is_found_beside_others_that_lose_nothing() -> None:
    test = DriftTest(EDGES, ALLOWED, ALPHA)
    for _ in range(50):
        test.add(100, 0.0, 16)
        test.add(2049, 0.9, 16)
    assert [bucket.name for bucket in test.buckets if bucket.breached] == ["2049-8192"]
    bucket = test.buckets[1]
    assert (bucket.requests, bucket.tokens, bucket.mean, bucket.stderr) == (50, 800, pytest.approx(0.9), 0.0)
    assert test.evidence(bucket) > 1 > test.evidence(test.buckets[0])


def test_the_mean_is_of_whole_changes_and_the_cut_mean_of_what_was_tested() -> None:
    bucket = DriftTest((), ALLOWED, ALPHA).add(5, 99.0, 1)
    assert (bucket.mean, bucket.cut_mean) == (99.0, LEAST_CUT)


def test_what_was_found_stays_found() -> None:
    test = DriftTest((10,), ALLOWED, ALPHA)
    while not test.add(5, 0.9, 1).breached:
        pass
    for _ in range(100):
        test.add(5, 0.0, 1)
    assert test.breached is test.buckets[0] and test.evidence(test.buckets[0]) < 1


def test_streams_are_bet_on_alone() -> None:
    """What the simulations above bet on many at once is what a bucket bets on."""
    changes = np.random.default_rng(6).normal(0.3, 1, (200, 2))
    both, one = Bets(ALLOWED, (2,)), Bets(ALLOWED)
    for now in changes:
        both.add(now)
        one.add(now[1])
    assert float(one.log_evidence) == pytest.approx(float(both.log_evidence[1]))
