"""Greedy on synthetic engines whose optimum is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import Goal
from indexcache_search.strategies.greedy import check_reachable, fixed_layers, greedy, split_blocks
from indexcache_search.strategies.similarity import similarity_pattern
from sglang_indexcache import Pattern


def separable(costs: Sequence[float]) -> Callable[[Sequence[Pattern]], list[float]]:
    """A loss in which each shared layer costs its own amount: greedy is optimal."""
    return lambda patterns: [sum(costs[layer] for layer in pattern.shared_layers) for pattern in patterns]


def algorithm_1(layers: int, full: int) -> int:
    return Goal(native=Pattern.full(layers), full_layers={Fraction(full, layers): full}).algorithm_1


@given(st.lists(st.floats(0, 10), min_size=2, max_size=12), st.data())
def test_greedy_finds_the_known_optimum(costs: list[float], data: st.DataObject) -> None:
    stop = data.draw(st.integers(1, len(costs)))
    evaluate = separable(costs)
    steps = list(greedy(Pattern.full(len(costs)), stop, evaluate))
    found = steps[-1].pattern if steps else Pattern.full(len(costs))
    assert len(found.full_layers) == stop
    layers = range(1, len(costs))
    every = [Pattern.from_full_layers(len(costs), [0, *kept]) for kept in itertools.combinations(layers, stop - 1)]
    assert evaluate([found])[0] == pytest.approx(min(evaluate(every)))


@pytest.mark.parametrize(("layers", "full"), [(78, 20), (47, 12), (16, 2), (5, 1), (5, 5)])
def test_evaluations_are_those_of_the_formula(layers: int, full: int) -> None:
    asked: list[str] = []

    def evaluate(patterns: Sequence[Pattern]) -> list[float]:
        asked.extend(pattern.roles for pattern in patterns)
        return [float(len(pattern.full_layers)) for pattern in patterns]

    steps = list(greedy(Pattern.full(layers), full, evaluate))
    expected = sum(layers - 1 - step for step in range(layers - full))
    assert len(asked) == len(set(asked)) == expected == algorithm_1(layers, full)
    assert len(steps) == layers - full


def test_glm5_to_a_quarter_is_2813_evaluations_and_to_the_end_n_times_n_minus_1_halves() -> None:
    assert algorithm_1(78, 20) == 2813
    assert algorithm_1(47, 1) == 47 * 46 // 2


def test_steps_are_nested_and_carry_all_flips() -> None:
    steps = list(greedy(Pattern.full(6), 2, separable([0, 5, 1, 4, 2, 3])))
    assert [step.layer for step in steps] == [2, 4, 5, 3]
    assert [step.pattern.roles for step in steps] == ["FFSFFF", "FFSFSF", "FFSFSS", "FFSSSS"]
    assert steps[1].losses == {1: 6, 3: 5, 4: 3, 5: 4}
    assert steps[-1].loss == 10


def test_ties_go_to_the_lowest_layer() -> None:
    steps = list(greedy(Pattern.full(5), 1, lambda patterns: [0.0] * len(patterns)))
    assert [step.layer for step in steps] == [1, 2, 3, 4]


def test_locked_layers_are_never_flipped() -> None:
    start = Pattern("FFSFSF")
    steps = list(greedy(start, 2, separable([0, 1, 0, 2, 0, 3])))
    assert [step.layer for step in steps] == [1, 3]
    assert steps[-1].pattern.roles == "FSSSSF"


@given(st.integers(1, 40), st.data())
def test_blocks_are_contiguous_and_even(layers: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, layers))
    spans = split_blocks(layers, blocks)
    assert list(itertools.chain.from_iterable(spans)) == list(range(layers))
    assert {len(span) for span in spans} <= {layers // blocks, layers // blocks + 1}


def test_block_wise_greedy_commits_up_to_p_layers_a_round() -> None:
    rounds: list[list[int]] = []

    def evaluate(patterns: Sequence[Pattern]) -> list[float]:
        rounds.append([len(pattern.shared_layers) for pattern in patterns])
        return separable([0, 9, 8, 7, 0, 1, 2, 3])(patterns)

    steps = list(greedy(Pattern.full(8), 2, evaluate, blocks=2))
    # Two blocks, layers 0-3 and 4-7; 0 and 4 stay F; blocks take turns and see what the other has committed.
    assert [step.layer for step in steps] == [3, 5, 2, 6, 1, 7]
    assert rounds == [[1, 1, 1], [2, 2, 2], [3, 3], [4, 4], [5], [6]]
    assert len(rounds) == len(steps)
    assert sum(map(len, rounds)) == 12 < algorithm_1(8, 2)


def test_block_wise_stops_in_the_middle_of_a_round() -> None:
    steps = list(greedy(Pattern.full(8), 5, separable([0, 9, 8, 7, 0, 1, 2, 3]), blocks=2))
    assert [step.layer for step in steps] == [3, 5, 2]


def test_block_firsts_skip_locked_layers() -> None:
    assert fixed_layers(Pattern("FFFFSFFF"), 2) == {0, 5}


@pytest.mark.parametrize(
    ("start", "stop", "blocks", "message"),
    [
        ("FFFFFF", 1, 2, "keeps 2"),
        ("FSFSFS", 4, 1, "only 3 layers have an indexer"),
        ("FFFF", 2, 5, "--strategy has blocks=5"),
    ],
)
def test_unreachable_goals_are_refused(start: str, stop: int, blocks: int, message: str) -> None:
    with pytest.raises(SearchError, match=message):
        check_reachable(Pattern(start), stop, blocks)


def total_similarity(matrix: np.ndarray, pattern: Pattern) -> float:
    return sum(matrix[layer, pattern.source_layers[layer]] for layer in pattern.shared_layers)


@pytest.mark.parametrize("full", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_similarity_program_is_optimal(full: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).random((7, 7))
    every = [Pattern.from_full_layers(7, [0, *kept]) for kept in itertools.combinations(range(1, 7), full - 1)]
    found = similarity_pattern(matrix, full, Pattern.full(len(matrix)))
    assert len(found.full_layers) == full
    assert total_similarity(matrix, found) == pytest.approx(max(total_similarity(matrix, one) for one in every))


def test_similarity_program_respects_locked_layers_and_breaks_ties_low() -> None:
    matrix = np.random.default_rng(0).random((6, 6))
    assert set(similarity_pattern(matrix, 3, Pattern("FSSFSF")).full_layers) == {0, 3, 5}
    assert similarity_pattern(np.ones((6, 6)), 3, Pattern("FFFFFF")).roles == "FFFSSS"
    with pytest.raises(SearchError, match="only 3 layers"):
        similarity_pattern(matrix, 4, Pattern("FSSFSF"))
