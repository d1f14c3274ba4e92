"""Scores of two servers on the same documents: how often an interval or a gate is wrong, and what it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from indexcache_harness.paired import ALPHA, change, fewest_documents, p_of_fall, p_of_falls, worse_by

# -- the interval


def test_scores_that_are_equal_may_differ_on_documents_that_were_not_asked() -> None:
    found = change([1, 0, 1], [1, 0, 1])
    assert (found.change, found.fell, found.rose, found.p_value) == (0, 0, 0, 1)
    assert found.low == pytest.approx(-0.4) and found.high == pytest.approx(0.4)


def test_one_document_says_nothing() -> None:
    """It had the interval -1 to -1, by bootstrap over itself."""
    found = change([1], [0])
    assert found.low == -1.0 and found.high is not None and found.high > 0.4
    found = change([0.5], [0.2])
    assert found.low is found.high is None
    assert change([0.5, 0.6], [0.2, 0.3]).low is None  # nor do two that fall alike


def test_mcnemars_test_is_exact() -> None:
    found = change([1] * 10 + [0] * 2, [0] * 7 + [1] * 3 + [1, 0])
    assert (found.documents, found.fell, found.rose) == (12, 7, 1)
    assert found.p_value == pytest.approx(2 * (1 + 8) / 2**8)
    assert found.change == pytest.approx(-0.5) and found.low < -0.5 < found.high <= 0


def test_scores_between_0_and_1_have_an_interval_and_no_mcnemar() -> None:
    rng = np.random.default_rng(3)
    before = rng.uniform(size=400)
    found = change(before.tolist(), (before + rng.normal(0.1, 0.2, 400)).tolist())
    error = 0.2 / 20
    assert found.p_value is None and found.high is not None and found.low is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_an_interval_covers_the_true_change_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(4), 0
    for _ in range(100):
        before = (rng.uniform(size=80) < 0.8).astype(float)
        after = np.where(rng.uniform(size=80) < 0.25, 0.0, before)  # a fall of 0.2
        found = change(before.tolist(), after.tolist())
        assert found.high is not None and found.low is not None
        covered += found.low <= -0.2 <= found.high
    assert covered >= 88


# -- whether a score falls


def answers(rng: np.random.Generator, documents: int, fall: float = 0.0) -> np.ndarray[Any, Any]:
    """How much worse 0/1 scores of 0.8 get if a tenth of the answers differ by chance, and `fall` more are lost."""
    differ = np.where(rng.uniform(size=documents) < 0.1, rng.choice([-1.0, 1.0], documents), 0.0)
    return np.where(rng.uniform(size=documents) < fall, 1.0, differ)


@pytest.mark.parametrize("most", [0.01, pytest.param(0.0, marks=pytest.mark.slow)])
def test_equal_servers_pass_57_tasks_19_times_in_20(most: float) -> None:
    """The largest of 57 intervals without a correction closed the gate in 6 runs of 10, one document alone as well."""
    rng, closed, before = np.random.default_rng(41), 0, 0
    for _ in range(20):
        worse = [answers(rng, 30 + 5 * number) for number in range(57)]
        found = p_of_falls(worse, most)
        closed += min(found) <= ALPHA
        low = [item.mean() - 1.96 * item.std(ddof=1) / len(item) ** 0.5 for item in worse]
        before += max(low) > most
    assert closed <= 3 and before > 4


def test_a_fall_of_a_tenth_in_one_of_57_tasks_is_found() -> None:
    rng, seen, others = np.random.default_rng(42), 0, 0
    for _ in range(10):
        found = p_of_falls([answers(rng, 400, 0.1 if number == 7 else 0.0) for number in range(57)], 0.01)
        seen += found[7] <= ALPHA
        others += min(found[:7] + found[8:]) <= ALPHA
    assert seen >= 8 and others <= 2


def test_a_fall_as_large_as_is_allowed_passes() -> None:
    rng = np.random.default_rng(43)
    shown = sum(p_of_fall(answers(rng, 200, 0.1), 0.11, 2_000) <= ALPHA for _ in range(200))
    assert shown <= 18


def test_scores_between_0_and_1_are_tested_by_the_same_flips() -> None:
    rng, wrong, right = np.random.default_rng(44), 0, 0
    for _ in range(100):
        same = rng.normal(0, 0.2, 60) ** 3  # heavy tails
        wrong += p_of_fall(same, 0.0, 2_000) <= ALPHA
        right += p_of_fall(rng.normal(0.1, 0.2, 60), 0.01, 2_000) <= ALPHA
    assert wrong <= 11 and right >= 80


def test_where_nothing_is_allowed_it_is_mcnemars_test_of_one_side() -> None:
    worse = worse_by([(1, 0)] * 7 + [(0, 1)] + [(1, 1)] * 4, higher_is_better=True)
    assert p_of_fall(worse, 0.0) == pytest.approx((1 + 8) / 2**8, abs=0.004)
    assert (worse_by([(0.0, 1.0)], higher_is_better=False) == [1.0]).all()


def test_a_score_needs_as_many_documents_as_could_show_a_fall_of_all() -> None:
    for scores in (1, 57):
        enough = fewest_documents(scores)
        for documents, shown in ((enough, True), (enough - 2, False)):
            found = p_of_falls([np.ones(documents), *[np.zeros(9)] * (scores - 1)], 0.01)
            assert (found[0] <= ALPHA) == shown
