"""Strategies on engines whose optimum is known, and what they evaluate."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.engines.base import Evaluation
from indexcache_search.evaluator import Evaluator
from indexcache_search.judge import Judge, student
from indexcache_search.strategies.base import Step
from indexcache_search.strategies.dynamic_program import cheapest_patterns
from indexcache_search.strategies.exhaustive import count_patterns, every_pattern, layers_to_run
from indexcache_search.strategies.greedy import greedy
from indexcache_search.strategies.lazy import LazyFlips
from indexcache_search.strategies.segments import SegmentCosts
from indexcache_search.strategies.swaps import Flips, improve, swap_line
from scripts.simulated import SimulatedEngine, Structure
from sglang_indexcache import Pattern
from tests.conftest import made_up

SEPARABLE = Structure(distance=0.0, pairs=0.0, neighbours=0.0, sequences=(0.0, 0.0), idiosyncratic=(0.0, 0.0))
NOISELESS = Structure(sequences=(0.0, 0.0), idiosyncratic=(0.0, 0.0))


class Memory:
    """A journal that is no file."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], Evaluation] = {}

    def evaluation(self, part: str, pattern: Pattern, repeat: int = 0) -> Evaluation | None:
        return self.found.get((pattern.key, repeat))

    def add_evaluation(self, part: str, evaluation: Evaluation, repeat: int = 0) -> None:
        key = (evaluation.pattern.key, repeat)
        self.found[key] = self.found[key] + evaluation if key in self.found else evaluation


class TableEngine:
    """Losses from a function of pattern and row; counts what it is asked."""

    def __init__(self, loss: Callable[[Pattern, int], float], tokens: Callable[[int], int] = lambda row: 1) -> None:
        self.loss, self.tokens, self.asked = loss, tokens, list[tuple[str, int]]()

    def evaluate(
        self, patterns: Sequence[Pattern], data: TokenSet, objective: str, rows: Sequence[int], fresh: bool = False
    ) -> Iterator[Evaluation]:
        for pattern in patterns:
            self.asked += [(pattern.roles, row) for row in rows]
            losses = tuple(self.loss(pattern, row) for row in rows)
            ones = (1,) * len(rows)
            yield Evaluation(pattern, tuple(rows), losses, ones, tuple(map(self.tokens, rows)), ones, 0.0)


def token_set(sequences: int = 16, sources: int = 1) -> TokenSet:
    tokens = np.zeros((sequences, 1), np.int32)
    names = tuple(map(str, range(sources)))
    return TokenSet(tokens, np.ones_like(tokens, bool), np.arange(sequences) % sources, names)


def judge_of(engine: Any, data: TokenSet, race: bool = False) -> Judge:
    evaluator = Evaluator(engine, data, "nll", Memory(), "calibration")  # type: ignore[arg-type]
    return Judge.racing(evaluator) if race else Judge(evaluator)


def simulated(layers: int, seed: int, structure: Structure, race: bool = False, sequences: int = 16) -> Judge:
    engine = SimulatedEngine(layers, seed, structure)
    return judge_of(engine, engine.tokens(sequences), race)


def evaluations(judge: Judge) -> int:
    return judge._evaluator.cost.evaluations


# -- racing


@given(st.integers(1, 80), st.integers(1, 4), st.integers(1, 12))
def test_shares_grow_keep_proportions_and_end_with_everything(sequences: int, sources: int, first: int) -> None:
    if sequences < sources:
        return
    data = token_set(sequences, sources)
    shares = growing_shares(data, first)
    assert sorted(shares[-1]) == list(range(sequences))
    for small, large in itertools.pairwise(shares):
        assert large[: len(small)] == small and len(large) <= 2 * len(small)
    counts = np.bincount(data.source_of[shares[0]], minlength=sources)
    assert all(counts >= np.minimum(2, np.bincount(data.source_of, minlength=sources)))
    assert counts.max() - counts.min() <= 1 or len(shares) == 1


def test_a_race_ends_early_for_the_worse_and_the_winner_runs_on_everything() -> None:
    native, layers = Pattern.full(9), range(1, 9)
    engine = TableEngine(lambda pattern, row: sum(pattern.shared_layers) + 0.01 * ((row * 7 + len(pattern)) % 5))
    judge = judge_of(engine, token_set(32), race=True)
    choice = judge.choose([native.share(layer) for layer in layers], native)
    assert choice.best == 0 and choice.increases[0] == pytest.approx(1.0)
    assert choice.loss == judge.losses([native.share(1)])[0]
    runs = {layer: sum(roles == native.share(layer).roles for roles, _ in engine.asked) for layer in layers}
    assert runs == {1: 32, **dict.fromkeys(range(2, 9), 4)}
    assert len(engine.asked) == len(set(engine.asked))


def test_a_race_between_equals_sends_the_better_half_on() -> None:
    engine = TableEngine(lambda pattern, row: float(made_up(pattern.roles, row) % 1000))
    judge, native = judge_of(engine, token_set(32), race=True), Pattern.full(9)
    judge.choose([native.share(layer) for layer in range(1, 9)], native)
    runs = sorted(sum(roles == native.share(layer).roles for roles, _ in engine.asked) for layer in range(1, 9))
    assert sum(runs) <= 4 * 4 + 2 * 8 + 16 + 32 and runs[-1] == 32


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_a_race_without_noise_chooses_as_no_race_does(seed: int) -> None:
    native = Pattern.full(12)
    candidates = [native.share(layer) for layer in range(1, 12)]
    plain, race = (simulated(12, seed, NOISELESS, race=flag) for flag in (False, True))
    assert plain.choose(candidates, native) == race.choose(candidates, native) or (
        plain.choose(candidates, native).best == race.choose(candidates, native).best
    )
    assert race._evaluator.cost.sequences < plain._evaluator.cost.sequences / 2


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 13.968), (2, 4.527), (6, 2.517), (30, 2.087), (1000, 2.0025)])
def test_students_quantile(degrees: int, quantile: float) -> None:
    assert student(2.0, degrees) == pytest.approx(quantile, rel=1e-3)
    assert student(2.0, 0) == math.inf


# -- lazy greedy


def lazy_steps(layers: int, stop: int, judge: Judge, candidates: int) -> list[Step]:
    flips = LazyFlips(Pattern.full(layers), judge, candidates)
    return [flips.flip() for _ in range(layers - stop)]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 11))
def test_lazy_takes_the_steps_of_greedy_where_flips_do_not_interact(seed: int, stop: int) -> None:
    plain, lazy = (simulated(12, seed, SEPARABLE) for _ in range(2))
    expected = [step.layer for step in greedy(Pattern.full(12), stop, plain.losses)]
    found = lazy_steps(12, stop, lazy, 1)
    assert [step.layer for step in found] == expected
    # The first step looks at all 11; each later one at the cheapest of them and at the one above the last flip.
    assert evaluations(lazy) <= 1 + 11 + 2 * max(len(found) - 1, 0)
    assert len(found) < 3 or evaluations(lazy) < evaluations(plain)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_lazy_that_looks_at_everything_is_greedy(seed: int) -> None:
    plain, lazy = (simulated(10, seed, NOISELESS) for _ in range(2))
    expected = [(step.layer, step.losses) for step in greedy(Pattern.full(10), 2, plain.losses)]
    for step, (layer, losses) in zip(lazy_steps(10, 2, lazy, 10), expected, strict=True):
        assert step.layer == layer
        assert step.losses == pytest.approx({layer: losses[layer] for layer in step.losses})


def test_lazy_goes_on_while_an_old_cost_is_lower_than_the_best_new_one() -> None:
    """Layer 3 was cheaper than layer 4 when last seen, and is dear beside layer 1."""

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 1.0, 2: 1.0, 3: 1.1, 4: 1.2, 5: 1.3, 6: 9.0}
        dearer = 5.0 * ({1, 3} <= set(pattern.shared_layers))
        return sum(costs[layer] for layer in pattern.shared_layers) + dearer

    steps = lazy_steps(7, 4, judge_of(TableEngine(loss), token_set()), 1)
    assert [step.layer for step in steps] == [1, 2, 4]
    assert [sorted(step.losses) for step in steps] == [[1], [2], [3, 4]]  # 3 costs 6.1 beside 1, so 4 is evaluated, too


def test_lazy_looks_at_half_of_the_sequences_once_and_flips_on_all() -> None:
    """Layer 3 is cheap on the half that is looked at first, and dear on the rest."""
    third = [0.5] * 16 + [9.0] * 16
    engine = TableEngine(
        lambda pattern, row: sum(third[row] if layer == 3 else float(layer) for layer in pattern.shared_layers)
    )
    judge = judge_of(engine, token_set(32), race=True)
    assert set(judge.half) == set(range(16))
    steps = lazy_steps(7, 5, judge, 1)
    assert [step.layer for step in steps] == [1, 2]
    assert sorted(steps[0].losses) == [1, 3]
    asked = Counter(roles for roles, _ in engine.asked)
    assert [asked[Pattern.full(7).share(layer).roles] for layer in range(1, 7)] == [32, 16, 32, 16, 16, 16]


def test_lazy_looks_above_the_last_flip() -> None:
    """Layer 2 is dear as long as it would reuse layer 1, and cheap once that is S; old costs alone would not see it."""

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 0.1, 2: 9.0 if pattern[1] == "F" else 0.0, 3: 1.0, 4: 2.0}
        return sum(costs[layer] for layer in pattern.shared_layers)

    steps = lazy_steps(5, 2, judge_of(TableEngine(loss), token_set()), 1)
    assert [step.layer for step in steps] == [1, 2, 3]


# -- better than greedy


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_what_swaps_trade_is_better_than_before(seed: int) -> None:
    structure = Structure(neighbours=1.0, pairs=1.0, sequences=(0.0, 0.0), idiosyncratic=(0.0, 0.0))
    native, judge = Pattern.full(10), simulated(10, seed, structure)
    plain = list(greedy(native, 4, judge.losses))[-1]
    losses = [plain.loss, *judge.losses(list(improve(plain.pattern, native, judge, 100)))]
    assert losses == sorted(losses, reverse=True)


def test_swaps_end_in_the_best_pattern_that_one_swap_can_reach() -> None:
    native, start = Pattern.full(6), Pattern("FFSSSS")

    def loss(pattern: Pattern, row: int) -> float:
        return sum(layer != 3 for layer in pattern.full_layers) + 0.001 * (row % 2)

    engine = TableEngine(loss)
    swaps = list(improve(start, native, judge_of(engine, token_set(), race=True), 8))
    assert swaps == [Pattern("FSSFSS")]
    assert swap_line(start, swaps[0], judge_of(engine, token_set())) == (
        "swap: layer   1 -> S,   3 -> F, 2 of 6 F, loss 1.0005"
    )
    assert not list(improve(native, native, judge_of(engine, token_set()), 8))


def test_swaps_leave_locked_layers_alone() -> None:
    native = Pattern("FFSFFF")
    engine = TableEngine(lambda pattern, row: float(pattern[2] == "S") + (pattern[1] == "F"))
    for swap in improve(Pattern("FFSSFS"), native, judge_of(engine, token_set()), 8):
        assert swap[2] == "S"


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_segments_find_the_best_of_all_where_segments_do_not_interact(seed: int, full: int) -> None:
    structure = Structure(neighbours=0.0, sequences=(0.0, 0.0), idiosyncratic=(0.0, 0.0), pairs=0.0)
    judge, native = simulated(8, seed, structure), Pattern.full(8)
    losses = judge.losses(list(every_pattern(native, full)))
    found = SegmentCosts(native, judge).cheapest(full)[0].pattern
    assert judge.losses([found])[0] == pytest.approx(min(losses))


def test_segments_are_measured_only_where_a_pattern_needs_them() -> None:
    dear = {3: 10.0, 9: 10.0}
    engine = TableEngine(lambda pattern, row: sum(dear.get(layer, 0.01) for layer in pattern.shared_layers))
    judge = judge_of(engine, token_set())
    costs = SegmentCosts(Pattern.full(12), judge)
    assert len(costs) == 11  # every layer alone
    assert costs.cheapest(3)[0].pattern == Pattern("FSSFSSSSSFSS")
    assert len(costs) == 11 + 4  # of 66
    assert costs.cheapest(3)[0].pattern == Pattern("FSSFSSSSSFSS")
    assert len(costs) == 11 + 4


def test_segments_that_a_pattern_needs_are_measured_on_half_of_the_sequences() -> None:
    data = token_set(32)
    judge = judge_of(TableEngine(lambda pattern, row: 0.0), data, race=True)
    first, half = judge.shares[0], judge.shares[-2]

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 5.0, 2: 0.0 if row in first else 8.0, 3: 4.0}  # layer 2 only seems to be the cheapest
        return float(sum(costs[layer] for layer in pattern.shared_layers))

    engine = TableEngine(loss)
    costs = SegmentCosts(Pattern.full(4), judge_of(engine, data, race=True))
    assert costs.cheapest(3)[0].pattern == Pattern("FFFS")
    runs = {roles: [row for asked, row in engine.asked if asked == roles] for roles, _ in engine.asked}
    assert {roles: len(rows) for roles, rows in runs.items()} == {"FFFF": 32, "FSFF": 16, "FFSF": 16, "FFFS": 32}
    assert sorted(runs["FFFS"][:16]) == sorted(half)  # and the pattern itself on all


def test_another_pattern_is_found_where_half_of_the_sequences_did_not_show_what_one_costs() -> None:
    data = token_set(32)
    half = judge_of(TableEngine(lambda pattern, row: 0.0), data, race=True).shares[-2]

    def loss(pattern: Pattern, row: int) -> float:
        rare = 9.0 * (pattern[1] == "S" and row not in half)  # an ability that only later sequences need
        costs = {1: 0.1, 2: 9.0, 3: 1.0, 4: 9.0, 5: 1.1, 6: 1.3}
        return rare + sum(costs[layer] * (layer - pattern.source_layers[layer]) for layer in pattern.shared_layers)

    engine = TableEngine(loss)
    costs = SegmentCosts(Pattern.full(7), judge_of(engine, data, race=True))
    assert costs.last_check(4)[0].pattern == Pattern("FFFSFSS")
    assert sum(roles == "FFSFFFF" for roles, _ in engine.asked) == 4


def test_a_pattern_is_believed_only_once_it_ran() -> None:
    """Two segments that cost little alone break the model together, on every third sequence: no noise excuses it."""
    data = token_set(32)

    def loss(pattern: Pattern, row: int) -> float:
        together = pattern[2] == "S" and pattern[5] == "S"
        costs = {1: 0.3, 2: 0.1, 3: 0.4, 4: 0.5, 5: 0.1, 6: 0.6}
        return 60.0 * (together and row % 3 == 0) + sum(costs[layer] for layer in pattern.shared_layers)

    for seed in range(4):
        engine = TableEngine(lambda pattern, row, seed=seed: loss(pattern, row + seed))
        found = SegmentCosts(Pattern.full(7), judge_of(engine, data, race=True)).cheapest(5)
        assert found[0].pattern == Pattern("FSSFFFF") or found[0].pattern == Pattern("FSFFFSF")
        assert [item.cost for item in found] == sorted(item.cost for item in found)
        assert any(item.pattern == Pattern("FFSFFSF") and item.cost > item.predicted for item in found)


def test_what_looked_dear_on_few_sequences_gets_another_look() -> None:
    """One of the first sequences needs layer 1, no other does: few sequences must not rule it out for good."""
    data = token_set(32)
    first = judge_of(TableEngine(lambda pattern, row: 0.0), data, race=True).shares[0]

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 3.0 if row == first[0] else 0.0, 2: 0.6, 3: 9.0}
        return float(sum(costs[layer] for layer in pattern.shared_layers))

    [best, *_] = SegmentCosts(Pattern.full(4), judge_of(TableEngine(loss), data, race=True)).cheapest(3)
    assert best.pattern == Pattern("FSFF")


def test_the_last_check_finds_a_swap_that_segments_hide() -> None:
    """Layers 2 and 5 are dear alone and cheap together, which no sum over segments can show."""

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 0.3, 2: 0.5, 3: 0.6, 4: 0.8, 5: 0.4, 6: 0.9}
        together = pattern[2] == "S" and pattern[5] == "S"
        return sum(costs[layer] for layer in pattern.shared_layers) - 0.7 * together

    costs = SegmentCosts(Pattern.full(7), judge_of(TableEngine(loss), token_set(32), race=True))
    assert costs.cheapest(5)[0].pattern == Pattern("FSFFFSF")
    assert costs.last_check(5)[0].pattern == Pattern("FFSFFSF")
    assert costs.cheapest(5)[0].pattern == Pattern("FFSFFSF")  # and it is not forgotten


def test_the_last_check_tries_every_swap_where_there_are_few() -> None:
    """Layers 2 and 4 suit each other as sources, which no segment shows, nor either of them beside layer 5."""
    together = {(0, 2, 4): 0.1, (0, 2, 5): 0.5, (0, 4, 5): 0.8, (0, 2, 4, 5): 0.5}

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 0.1, 2: 0.3, 3: 0.1, 4: 0.2, 5: 0.4, 6: 0.1}
        alone = len(pattern.shared_layers) == 1
        return together.get(pattern.full_layers, sum(costs[layer] for layer in pattern.shared_layers) + 0.5 * alone)

    engine = TableEngine(loss)
    costs = SegmentCosts(Pattern.full(7), judge_of(engine, token_set(32), race=True))
    assert costs.cheapest(3)[0].pattern == Pattern("FSFSSFS")
    assert costs.last_check(3)[0].pattern == Pattern("FSFSFSS")


def test_where_few_layers_stay_the_last_check_may_begin_at_what_is_left_of_a_larger_pattern() -> None:
    """Layers 2 and 4 do together what no segment shows, two swaps away from what segments propose."""

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 1.0, 2: 1.1, 3: 1.0, 4: 1.1, 5: 1.4, 6: 1.5, 7: 1.6}
        together = len(pattern.full_layers) < 6 and {2, 4} <= set(pattern.full_layers)
        return sum(costs[layer] for layer in pattern.shared_layers) - 4.0 * together

    engine = TableEngine(loss)
    alone = SegmentCosts(Pattern.full(8), judge_of(engine, token_set(32), race=True))
    assert alone.last_check(3)[0].pattern == Pattern("FSSSSSFF")
    costs = SegmentCosts(Pattern.full(8), judge_of(engine, token_set(32), race=True))
    assert costs.cheapest(5)[0].pattern == Pattern("FSFSSFFF")  # 2, 5, 6 and 7
    assert costs.last_check(3)[0].pattern == Pattern("FSFSFSSS")


def swapped(best: Pattern, full: int, shared: int) -> Pattern:
    return best.share(full).unshare(shared)


@pytest.mark.parametrize(("layers", "tries"), [(8, 4), (14, 6), (16, 8), (60, 16)])
def test_the_last_check_tries_one_swap_in_seven_within_bounds(layers: int, tries: int) -> None:
    engine = TableEngine(lambda pattern, row: float(sum(pattern.shared_layers)))
    costs = SegmentCosts(Pattern.full(layers), judge_of(engine, token_set(32), race=True))
    costs.cheapest(layers // 2)
    before = {roles for roles, _ in engine.asked}
    costs.last_check(layers // 2)
    swaps = Counter(roles for roles, _ in engine.asked if roles.count("F") == layers // 2 and roles not in before)
    assert sum(rows > 4 for rows in swaps.values()) == tries


@pytest.mark.parametrize(
    ("cheap_rows", "rows_of"), [(8, {8: 8, 16: 8}), (16, {8: 8, 16: 6, 32: 2}), (32, {8: 8, 16: 6, 32: 2})]
)
def test_of_the_swaps_tried_half_go_on_and_two_run(cheap_rows: int, rows_of: dict[int, int]) -> None:
    """What is a swap away from the best looks far better than it is, on the first rows."""
    best = Pattern("F" + "S" * 12 + "F" * 11)

    def loss(pattern: Pattern, row: int) -> float:
        near = sum(a != b for a, b in zip(best.roles, pattern.roles, strict=True)) == 2
        return float(sum(pattern.shared_layers)) + (-100.0 if row < cheap_rows else 100.0) * near

    engine = TableEngine(loss)
    native, judge = Pattern.full(24), judge_of(engine, token_set(32), race=True)
    costs = SegmentCosts(native, judge)
    assert costs.cheapest(12)[0].pattern == best
    before = {roles for roles, _ in engine.asked}
    costs._better(costs._run(costs._proposal(best)), Flips(best, native, judge), [])
    asked = Counter(roles for roles, _ in engine.asked if roles.count("F") == 12 and roles not in before)
    assert Counter(asked.values()) == rows_of


def test_what_ran_before_is_taken_once_it_costs_less_by_more_than_noise() -> None:
    engine = TableEngine(lambda pattern, row: float(sum(pattern.shared_layers)))
    native, judge = Pattern.full(8), judge_of(engine, token_set(32), race=True)
    costs = SegmentCosts(native, judge)
    [best] = costs.cheapest(4)
    worse = costs._run(costs._proposal(swapped(best.pattern, 7, 1)))
    assert costs._better(worse, Flips(worse.pattern, native, judge), [worse, best]) == best


def test_the_last_check_of_many_swaps_flips_single_layers() -> None:
    """The last two layers are dear alone, and cost next to nothing beside others that share: no segment shows it."""

    def loss(pattern: Pattern, row: int) -> float:
        cheap = pattern[1] == "S"
        return sum(
            (0.05 if cheap else 5.0) if layer >= 18 else 0.1 * layer for layer in pattern.shared_layers
        ) + 0.01 * (row % 3)

    costs = SegmentCosts(Pattern.full(20), judge_of(TableEngine(loss), token_set(32), race=True))
    assert costs.cheapest(10)[0].pattern.shared_layers == tuple(range(1, 11))
    assert costs.last_check(10)[0].pattern.shared_layers == (*range(1, 9), 18, 19)  # one swap, then another


def test_the_last_check_takes_no_swap_that_is_within_noise() -> None:
    """Another swap costs a little less in the mean, and much more or less on each sequence."""

    def loss(pattern: Pattern, row: int, noise: float) -> float:
        costs = {1: 0.3, 2: 0.5, 3: 0.6, 4: 0.8, 5: 0.4, 6: 0.9}
        together = pattern[2] == "S" and pattern[5] == "S"
        return sum(costs[layer] for layer in pattern.shared_layers) - together * (0.21 + noise * (-1) ** (row // 16))

    for noise, found in ((0.001, "FFSFFSF"), (1.0, "FSFFFSF")):
        engine = TableEngine(lambda pattern, row, noise=noise: loss(pattern, row, noise))
        costs = SegmentCosts(Pattern.full(7), judge_of(engine, token_set(32), race=True))
        [best, *others] = costs.last_check(5)
        assert best.pattern == Pattern(found)
        rival = next(item for item in others if item.pattern.shared_layers in ((1, 5), (2, 5)))
        assert (rival.cost < best.cost) == (noise == 1.0)


def test_what_tells_most_is_the_first_share_and_where_a_pattern_costs_most() -> None:
    data = token_set(32, sources=2)
    dear = (9, 11, 30, 31)
    engine = TableEngine(lambda pattern, row: float(row) + 5.0 * (pattern[1] == "S") * (row in dear or row < 2))
    judge = judge_of(engine, data, race=True)
    first = set(judge.shares[0])
    assert len(first) == 4 and first >= {0, 1}
    assert judge.telling(Pattern("FSF"), Pattern("FFF")) == sorted(first | set(dear))
    everything = judge_of(engine, data)
    assert everything.telling(Pattern("FSF"), Pattern("FFF")) == list(range(32))


def test_what_tells_most_counts_sources_alike() -> None:
    """A sequence of a source with little text weighs more in the loss than one of a source with much."""
    data = token_set(24)
    data = TokenSet(data.tokens, data.scored, (np.arange(24) >= 20).astype(np.int64), ("long", "short"))
    engine = TableEngine(lambda pattern, row: (2.0 if row < 20 else 1.0) * (pattern[1] == "S"))
    judge = judge_of(engine, data, race=True)
    rows = judge.telling(Pattern("FSF"), Pattern("FFF"))
    assert set(judge.shares[0]) < set(rows) and set(range(20, 24)) <= set(rows)


def test_what_tells_most_counts_sequences_alike() -> None:
    """Rows 20 to 23 cost most per token, and have few tokens."""
    engine = TableEngine(
        lambda pattern, row: (2.0 if row < 20 else 1.0) * (pattern[1] == "S"), lambda row: 100 if row < 20 else 10
    )
    judge = judge_of(engine, token_set(24), race=True)
    assert {20, 21, 22} <= set(judge.telling(Pattern("FSF"), Pattern("FFF")))


@pytest.mark.parametrize("full", range(1, 6))
def test_the_last_check_swaps_no_locked_layer(full: int) -> None:
    native = Pattern("FFSFFF")
    engine = TableEngine(
        lambda pattern, row: float(pattern[2] == "S") + (pattern[1] == "F") - 3.0 * (pattern[4] == "S")
    )
    costs = SegmentCosts(native, judge_of(engine, token_set()))
    for item in costs.last_check(full):
        assert item.pattern[0] == "F" and item.pattern[2] == "S" and len(item.pattern.full_layers) == full
    assert all(roles[2] == "S" for roles, _ in engine.asked)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 12))
def test_the_cheapest_patterns_are_those_of_all(seed: int, full: int, count: int) -> None:
    costs = np.random.default_rng(seed).random((7, 8))
    everything = sorted(
        (sum(costs[pair] for pair in itertools.pairwise([*pattern.full_layers, 7])), pattern.roles)
        for pattern in every_pattern(Pattern.full(7), full)
    )
    found = cheapest_patterns(costs, full, Pattern.full(len(costs)), count)
    assert [pattern.roles for _, pattern in found] == [roles for _, roles in everything[:count]]
    assert [cost for cost, _ in found] == pytest.approx([cost for cost, _ in everything[:count]])


def test_segments_leave_locked_layers_alone() -> None:
    native = Pattern("FFSFFF")
    engine = TableEngine(lambda pattern, row: float(sum(layer != 3 for layer in pattern.shared_layers)))
    judge = judge_of(engine, token_set())
    costs = SegmentCosts(native, judge)
    assert np.isinf(costs.estimates()[:, 2]).all()
    assert costs.cheapest(4)[0].pattern == Pattern("FFSSFF")
    assert costs.cheapest(5)[0].pattern == native
    assert costs.cheapest(1)[0].pattern == Pattern("FSSSSS")


def test_exhaustive_lists_every_pattern_once() -> None:
    native = Pattern("FFSFFF")
    patterns = list(every_pattern(native, 3))
    assert len(patterns) == len(set(patterns)) == count_patterns(native, 3) == 6
    assert all(pattern[2] == "S" and len(pattern.full_layers) == 3 for pattern in patterns)
    assert layers_to_run([Pattern("FFFS"), Pattern("FFSF"), Pattern("FSFF")]) == 4 + 2 + 3


# -- the simulator


def test_the_simulator_is_reproducible_and_its_noise_averages_out() -> None:
    pattern = Pattern.uniform(47, 4)
    engine, again = (SimulatedEngine(47, 3, Structure()) for _ in range(2))
    data = engine.tokens(4000)
    [one], [other] = engine.evaluate([pattern], data, "kl"), again.evaluate([pattern], data, "kl", [5, 2])
    assert other.losses == one.on([5, 2]).losses
    text = [loss / tokens for loss, tokens in zip(one.losses[::2], one.tokens[::2], strict=True)]
    expected = engine.cost(pattern)
    assert np.mean(text) == pytest.approx(expected, rel=0.1)
    assert max(one.losses) <= 14.7 * max(one.tokens)
    assert engine.cost(Pattern.full(47)) == 0.0
    assert SimulatedEngine(47, 4, Structure()).cost(pattern) != expected
    assert one.layer_tokens == (47 * data.seq_len,) * 4000
