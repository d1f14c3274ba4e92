"""Strategies on engines whose optimum is known, and what they evaluate."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexcache_search.data.tokens import TokenSet, growing_shares
from indexcache_search.evaluation.estimates import student
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.judge import Judge
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.strategies.base import Goal, Outcome, Problem, Step, Strategy
from indexcache_search.strategies.exhaustive import count_patterns, every_pattern, layers_to_run
from indexcache_search.strategies.greedy import greedy
from indexcache_search.strategies.lazy import Lazy, LazyFlips
from indexcache_search.strategies.similarity import cheapest_segments
from indexcache_search.strategies.swaps import improve, last_check, swap_line
from scripts.bench.search.simulated import SimulatedEngine, Structure
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
            yield Evaluation(
                pattern=pattern,
                rows=tuple(rows),
                losses=losses,
                correct=ones,
                tokens=tuple(map(self.tokens, rows)),
                layer_tokens=ones,
                seconds=0.0,
            )


def token_set(sequences: int = 16, sources: int = 1) -> TokenSet:
    tokens = np.arange(sequences, dtype=np.int32)[:, None]
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


@settings(max_examples=30)
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


def lazy_steps(layers: int, stop: int, judge: Judge, flips: int) -> list[Step]:
    lazy = LazyFlips(Pattern.full(layers), judge, flips)
    return [lazy.flip() for _ in range(layers - stop)]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 11))
@example(12038, 1)  # two layers cost the same but for what the ceiling of losses takes off
def test_lazy_takes_the_steps_of_greedy_where_flips_do_not_interact(seed: int, stop: int) -> None:
    plain, lazy = (simulated(12, seed, SEPARABLE) for _ in range(2))
    expected = [step.loss for step in greedy(Pattern.full(12), stop, plain.losses)]
    found = lazy_steps(12, stop, lazy, 1)
    assert [step.loss for step in found] == pytest.approx(expected, rel=5e-3)
    # The first step looks at all 11; each later one at the cheapest of them and at the one above the last flip.
    assert evaluations(lazy) <= 1 + 11 + 2 * max(len(found) - 1, 0)
    assert len(found) < 3 or evaluations(lazy) < evaluations(plain)


@settings(max_examples=20)
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


def test_lazy_drops_what_half_of_the_sequences_call_clearly_worse() -> None:
    """Layer 2 looks cheap on half once layer 1 is S, and a little dearer than 3; it is not on the other half."""
    scatter = [0.001 * (row % 3) for row in range(32)]

    def loss(pattern: Pattern, row: int, dear: float) -> float:
        costs = {1: 0.1, 2: 0.3, 3: 0.2 if row < 16 else dear, 4: 5.0}
        return sum(costs[layer] + scatter[row] * layer for layer in pattern.shared_layers)

    for dear, flipped, ran in ((0.2, 3, 16), (9.0, 2, 32)):  # where 3 is dear on all, 2 may still be cheaper
        engine = TableEngine(lambda pattern, row, dear=dear: loss(pattern, row, dear))
        steps = lazy_steps(5, 3, judge_of(engine, token_set(32), race=True), 2)
        assert [step.layer for step in steps] == [1, flipped]
        assert sorted(steps[1].losses) == ([3] if ran == 16 else [2, 3])
        asked = Counter(roles for roles, _ in engine.asked)
        assert asked["FSSFF"] == ran and asked["FSFSF"] == 32


def found_by(strategy: Strategy, goal: Goal, judge: Judge) -> tuple[Outcome, list[str]]:
    """What is found, and what there is notice of."""
    notices = list[str]()
    problem = Problem(
        goal=goal,
        judge=judge,
        engine="table",
        measured=lambda name: None,
        notice=notices.append,
    )
    return strategy.find(problem), notices


def found_by_lazy(native: Pattern, judge: Judge, full_layers: Sequence[int]) -> tuple[Outcome, list[str]]:
    """The same, for as many `F` layers."""
    retentions = {Fraction(count, len(native)): count for count in full_layers}
    return found_by(Lazy(), Goal(native=native, full_layers=retentions), judge)


def test_lazy_looks_at_swaps_of_each_pattern_that_is_asked_for() -> None:
    """Layers 2 and 4 are dear alone, and cheap once both are S; a flip at a time doesn't get there."""

    def loss(pattern: Pattern, row: int) -> float:
        costs = {1: 1.0, 2: 1.5, 3: 1.6, 4: 1.7, 5: 1.8, 6: 1.9}
        shared = set(pattern.shared_layers)
        return sum(costs[layer] for layer in shared) - 2.0 * ({2, 4} <= shared) + 0.001 * (row % 3)

    native = Pattern.full(7)
    engine = TableEngine(loss)
    outcome, notices = found_by_lazy(native, judge_of(engine, token_set(32), race=True), (7, 4))
    assert [step.layer for step in outcome.steps] == [1, 2, 3]
    assert outcome.patterns == {Fraction(1): native, Fraction(4, 7): Pattern("FSSFSFF")}
    assert notices == ["swap: layer   4 -> S,   3 -> F, 4 of 7 F, loss 2.2010"]
    assert outcome.rivals[Fraction(4, 7)][0] == outcome.steps[-1].pattern and not outcome.rivals[Fraction(1)]
    asked = Counter(roles for roles, _ in engine.asked)
    for pattern in (*outcome.patterns.values(), *itertools.chain(*outcome.rivals.values())):
        assert asked[pattern.roles] >= 32  # everything that stands in the outcome ran on all


def test_the_last_check_takes_no_swap_that_is_within_noise() -> None:
    best, swap = Pattern("FFSS"), Pattern("FSFS")
    for noise, order in ((0.001, [swap, best]), (1.0, [best, swap])):
        engine = TableEngine(lambda pattern, row, noise=noise: (pattern == swap) * (noise * (-1) ** (row // 2) - 0.05))
        judge = judge_of(engine, token_set(32), race=True)
        assert judge.difference(swap, best).mean == pytest.approx(-0.05)
        assert last_check(best, [swap], judge) == order
    assert last_check(best, [], judge) == [best]


@pytest.mark.parametrize(("cheap_rows", "runs"), [(0, [4] * 6), (4, [4, 4, 4, 8, 8, 8]), (32, [4, 4, 4, 8, 16, 32])])
def test_the_last_check_sends_the_better_half_of_what_costs_less_on(cheap_rows: int, runs: list[int]) -> None:
    best = Pattern("FFSSSSSS")
    swaps = [best.share(1).unshare(layer) for layer in range(2, 8)]

    def loss(pattern: Pattern, row: int) -> float:
        return 1.0 if pattern == best else (0.1 if row < cheap_rows else 2.0) + 0.01 * pattern.full_layers[-1]

    engine = TableEngine(loss)
    [taken, *others] = last_check(best, swaps, judge_of(engine, token_set(32), race=True))
    assert (taken, others) == ((swaps[0], [best]) if cheap_rows == 32 else (best, []))
    asked = Counter(roles for roles, _ in engine.asked)
    assert sorted(asked[swap.roles] for swap in swaps) == runs


@pytest.mark.parametrize(("layers", "tries"), [(8, 3), (24, 8)])
def test_lazy_tries_one_swap_for_three_layers(layers: int, tries: int) -> None:
    engine = TableEngine(lambda pattern, row: float(sum(pattern.shared_layers)))
    native, half = Pattern.full(layers), layers // 2
    found_by_lazy(native, judge_of(engine, token_set(32), race=True), [half])
    asked = Counter(roles for roles, _ in engine.asked if roles.count("F") == half)
    assert sorted(asked.values()) == [4] * tries + [32]  # the pattern itself, and no more of what costs more


def test_swaps_of_lazy_were_not_evaluated_and_touch_no_locked_layer() -> None:
    native = Pattern("FFSFFFFF")
    engine = TableEngine(lambda pattern, row: float(sum(pattern.shared_layers)))
    flips = LazyFlips(native, judge_of(engine, token_set()), 2)
    assert [flips.flip().layer for _ in range(3)] == [1, 3, 4]
    before = {roles for roles, _ in engine.asked}
    swaps = flips.swaps()
    assert swaps and not before & {swap.roles for swap in swaps}
    for swap in swaps:
        assert swap[0] == "F" and swap[2] == "S" and len(swap.full_layers) == 4
    assert swaps[0] == native.share(1).share(4).share(5)  # 5 for 4 was a candidate of the last step
    assert swaps[-1] == native.share(3).share(4).share(7)  # the cheapest flip undone for the dearest


# -- better than greedy


@settings(max_examples=25)
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


def test_what_tells_most_is_the_first_share_and_where_a_pattern_costs_most() -> None:
    data = token_set(32, sources=2)
    dear = (9, 11, 30, 31)
    engine = TableEngine(lambda pattern, row: float(row) + 5.0 * (pattern[1] == "S") * (row in dear or row < 2))
    judge = judge_of(engine, data, race=True)
    first = set(judge.shares[0])
    assert len(first) == 4 and first >= {0, 1}
    assert judge.informative_rows(Pattern("FSF"), Pattern("FFF")) == sorted(first | set(dear))
    everything = judge_of(engine, data)
    assert everything.informative_rows(Pattern("FSF"), Pattern("FFF")) == list(range(32))


def test_what_tells_most_counts_sources_alike() -> None:
    """A sequence of a source with little text weighs more in the loss than one of a source with much."""
    data = token_set(24)
    data = TokenSet(data.tokens, data.scored, (np.arange(24) >= 20).astype(np.int64), ("long", "short"))
    engine = TableEngine(lambda pattern, row: (2.0 if row < 20 else 1.0) * (pattern[1] == "S"))
    judge = judge_of(engine, data, race=True)
    rows = judge.informative_rows(Pattern("FSF"), Pattern("FFF"))
    assert set(judge.shares[0]) < set(rows) and set(range(20, 24)) <= set(rows)


def test_what_tells_most_counts_sequences_alike() -> None:
    """Rows 20 to 23 cost most per token, and have few tokens."""
    engine = TableEngine(
        lambda pattern, row: (2.0 if row < 20 else 1.0) * (pattern[1] == "S"), lambda row: 100 if row < 20 else 10
    )
    judge = judge_of(engine, token_set(24), race=True)
    assert {20, 21, 22} <= set(judge.informative_rows(Pattern("FSF"), Pattern("FFF")))


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_cheapest_segments_are_those_of_the_best_of_all_patterns(seed: int, full: int) -> None:
    costs, native = np.random.default_rng(seed).random((7, 8)), Pattern("FFFSFFF")
    everything = {
        pattern: sum(costs[pair] for pair in itertools.pairwise([*pattern.full_layers, 7]))
        for pattern in every_pattern(native, full)
    }
    assert cheapest_segments(costs, full, native) == min(everything, key=everything.__getitem__)


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
