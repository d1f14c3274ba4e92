"""Searches for a pattern within a time: the knapsack, and what is found where the optimum is known."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_search.cli.search import app
from indexcache_search.errors import SearchError
from indexcache_search.searching.settings import Budget, Settings, TimeBudget
from indexcache_search.strategies import strategy_of
from indexcache_search.strategies.base import Goal, Outcome, TimeGoal
from indexcache_search.strategies.budget import search as budget_search
from indexcache_search.strategies.budget.fit import BudgetFit, with_blocks
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.search import BudgetSearch
from indexcache_search.strategies.budget.table import LatencyTable
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import PatternFileError
from sglang_indexcache.pattern.indexer_setting import IndexerSetting
from sglang_indexcache.pattern_file.file import ModelSection
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from tests.conftest import tiny_config, tiny_dense_config
from tests.search.test_strategies import TableEngine, found_by, judge_of, token_set

SIZES = (4, 16)
PRICES = Prices(
    table="made up",
    words="made up",
    context=1000,
    full={1: 10.0, 4: 4.0, 16: 2.0},
    shared={1: 4.0, 4: 2.0, 16: 1.0},
    rest=2.0,
    decode_full=2.0,
    decode_shared=1.0,
)


def with_queries(pattern: Pattern, queries: dict[int, int]) -> Pattern:
    return with_blocks(
        pattern, [IndexerSetting(layer=layer, queries=number) for layer, number in queries.items() if number > 1]
    )


def test_times_are_those_of_layers_and_what_they_stand_behind() -> None:
    pattern, native = Pattern.parse("FSFFSS+2q4+3q16"), Pattern.full(6)
    assert PRICES.prompt_ms(pattern) == 2 + (10 + 4) + 4 + (2 + 2 * 1)
    assert PRICES.prompt_share(pattern, native) == pytest.approx(24 / 62)
    assert PRICES.decode_ms(pattern) == 3 * 2 + 3 and PRICES.decode_share(pattern, native) == 9 / 12


class Model:
    """Losses of patterns of five layers: what each `S` and each block of queries costs by itself, more with reuse."""

    def __init__(self, seed: int, layers: int = 5) -> None:
        draw = random.Random(seed)
        self.shared = [draw.lognormvariate(0, 1.5) for _ in range(layers)]
        self.blocks = {(layer, n): draw.lognormvariate(-2, 1.5) * n for layer in range(layers) for n in (4, 16)}
        self.native = Pattern.full(layers)

    def loss(self, pattern: Pattern, row: int = 0) -> float:
        reused = [sum(source == layer for source in pattern.source_layers) for layer in range(len(pattern))]
        blocks = sum(self.blocks[item.layer, item.queries] * reused[item.layer] for item in pattern.indexers)
        return 5.0 + sum(self.shared[layer] for layer in pattern.shared_layers) + blocks

    def everything(self, budget: float) -> Iterator[Pattern]:
        """All patterns whose prompts take at most `budget` milliseconds."""
        for kinds in itertools.product((0, 1, 4, 16), repeat=len(self.native) - 1):
            for first in (1, 4, 16):
                queries = [first, *kinds]
                pattern = self.native.keeping(layer for layer, number in enumerate(queries) if number)
                pattern = with_queries(pattern, {layer: number for layer, number in enumerate(queries) if number})
                if PRICES.prompt_ms(pattern) <= budget:
                    yield pattern


def search(model: Model, budget: float, most_full: int = 5) -> tuple[Pattern, Outcome]:
    """Search within so many milliseconds; return the pattern found, and the whole outcome."""
    time_goal = TimeGoal(share=budget / 52, prices=PRICES, queries=SIZES, most_full=most_full)
    goal = Goal(native=model.native, full_layers={Fraction(1, 5): 1}, budget=time_goal)
    judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
    outcome, _ = found_by(BudgetSearch(), goal, judge)
    assert outcome.within_budget is not None
    return outcome.within_budget, outcome


def test_what_is_found_takes_no_longer_and_is_nearly_always_the_best() -> None:
    best = 0
    for seed, budget in itertools.product(range(12), (14.0, 20.0, 30.0)):
        model = Model(seed)
        found, outcome = search(model, budget)
        least = min(map(model.loss, model.everything(budget)))
        assert PRICES.prompt_ms(found) <= budget and least <= model.loss(found)
        assert outcome.patterns[Fraction(1, 5)].letters.count("F") == 1 and len(outcome.steps) == 4
        best += model.loss(found) == pytest.approx(least)
    assert best >= 26, best  # of 36: layers with cheap blocks need not be those that are dear to share


class Rare(Model):
    """Blocks of 16 in some layers cost nothing but on one sequence, which is in the second half."""

    def __init__(self, seed: int, row: int) -> None:
        super().__init__(seed)
        self._row, self._rare = row, set(random.Random(seed).sample(range(5), 2))
        self.blocks |= {(layer, 16): 0.0 for layer in self._rare}

    def loss(self, pattern: Pattern, row: int = 0) -> float:
        rare = [item for item in pattern.indexers if item.queries == 16 and item.layer in self._rare]
        return super().loss(pattern) + (50.0 * len(rare) if row == self._row else 0.0)

    def mean(self, pattern: Pattern) -> float:
        return sum(self.loss(pattern, row) for row in range(16)) / 16


def test_what_is_lost_on_rare_sequences_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judge_of(TableEngine(Model(0).loss), token_set(16), race=True)
    row = next(row for row in range(16) if row not in judge.half)
    best, gains = 0, list[float]()
    for seed in range(12):
        model = Rare(seed, row)
        found, _ = search(model, 20.0)
        best += model.mean(found) == pytest.approx(min(map(model.mean, model.everything(20.0))))
        with monkeypatch.context() as patch:
            patch.setattr(budget_search, "LOOKS", 1)
            gains.append(model.mean(search(model, 20.0)[0]) - model.mean(found))
    worse, better = (sum(sign * gain > 1e-9 for gain in gains) for sign in (1, -1))
    assert best >= 4 and worse > better and sum(gains) > 1, (best, worse, better, sum(gains))


def test_decoding_limits_the_layers_that_choose() -> None:
    best = 0
    for seed in range(12):
        model = Model(seed)
        found, _ = search(model, 24.0, most_full=2)
        assert len(found.full_layers) <= 2 and PRICES.prompt_ms(found) <= 24
        least = min(model.loss(item) for item in model.everything(24.0) if len(item.full_layers) <= 2)
        best += model.loss(found) == pytest.approx(least)
        assert model.loss(search(model, 24.0)[0]) <= model.loss(found)
    assert best >= 10, best


def test_the_knapsack_is_exact() -> None:
    for seed in range(20):
        model = Model(seed, layers=4)
        pattern = Pattern("FFSF")
        judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
        for budget in (12.1, 15.1, 20.1, 25.1, 36.1):  # units of the knapsack are rounded up
            goal = TimeGoal(share=budget / 42, prices=PRICES, queries=SIZES, most_full=4)
            fit = BudgetFit(pattern, judge, goal, Pattern.full(4))
            for layer in pattern.full_layers:  # guesses are another test's
                fit._measure([IndexerSetting(layer=layer, queries=4)])
            options = [
                option
                for kinds in itertools.product((1, 4, 16), repeat=3)
                if goal.fits(option := with_queries(pattern, dict(zip((0, 1, 3), kinds, strict=True))), Pattern.full(4))
            ]
            found = fit.best()
            assert BudgetFit.possible(pattern, goal, Pattern.full(4)) == bool(options)
            if not options:
                assert found is None
                continue
            assert found is not None and goal.fits(found, Pattern.full(4))
            assert model.loss(found) == pytest.approx(min(map(model.loss, options)))


def tiny_settings(**change: Any) -> Settings:
    given: dict[str, Any] = {"prefill": Budget(0.5, 131072, "glm-5-tp8"), "queries": (4, 8)}
    return Settings(retain=(Fraction(1, 2),), strategy=BudgetSearch(), budget=TimeBudget(**(given | change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (16, 64)}, "--prefill: queries of at most 8 were expected, as the model selects"),
        ({"prefill": Budget(0.1, 131072, "glm-5-tp8")}, "--prefill is 0.1, expected at least 0.2"),
        (
            {"prefill": Budget(0.5, 1000, "glm-5-tp8")},
            "1000 tokens are outside of the latency table glm-5-tp8, expected 16384",
        ),
        (
            {"prefill": Budget(0.5, 131072, "none")},
            "prices: none: .*expected a file or one of deepseek-v3.2-tp8, glm-5",
        ),
        ({"decode": Budget(0.5, 131072)}, r"--decode is 0.5, expected at least 0.8\d+: what one F layer takes"),
    ],
)
def test_what_can_not_be_priced_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        tiny_settings(**change).goal(describe(tiny_config(), "tiny"))


def test_a_time_of_decoding_is_a_number_of_layers() -> None:
    goal = tiny_settings(decode=Budget(0.95, 131072)).goal(describe(tiny_config(), "tiny"))
    assert goal.budget is not None and goal.budget.most_full == 3
    native, prices = goal.native, goal.budget.prices
    shares = [prices.decode_share(native.keeping(native.full_layers[:count]), native) for count in (3, 4)]
    assert shares[0] <= 0.95 < shares[1]


@pytest.mark.parametrize("asked", [{"name": "greedy"}, {"swaps": 4}], ids=str)
def test_only_lazy_without_swaps_looks_for_a_time(asked: dict[str, Any]) -> None:
    with pytest.raises(SearchError, match="--prefill needs --strategy lazy, without swaps"):
        strategy_of(budget=TimeBudget(prefill=Budget(0.5, 131072)), **asked)


def test_dense_models_have_no_indexers_to_price() -> None:
    with pytest.raises(SearchError, match="--prefill is about indexers, the model is dense"):
        tiny_settings().goal(describe(tiny_dense_config(), "tiny"))


def test_a_file_says_what_was_found_and_no_more_than_its_share() -> None:
    model = describe(tiny_config(), "tiny")
    section = ModelSection.of(model)
    patterns = {"1/2": "FFFFSS+0q4+1q4", "1/3": "FSFSSF+0q4"}
    content = {"schema": "indexcache/v1", "model": section, "retention": 4 / 6, "pattern": patterns["1/2"]}
    file = PatternFile(**content, patterns=patterns | {"1/3": "FSFSSF+0q2+2q2"})
    assert PatternFile.loads(file.dumps()) == file
    with pytest.raises(PatternFileError, match=r"patterns.1/3: found 2.25 F layers, expected 2 of 6"):
        PatternFile.loads(file.dumps().replace("FSFSSF+0q2+2q2", patterns["1/3"]))


@pytest.mark.usefixtures("no_pictures")
def test_a_search_from_the_command_line(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model_folder), "--calibration", str(token_file), "--seq-len", "32"]
    arguments += ["--num-sequences", "8", "--num-eval-sequences", "6", "--output", str(tmp_path / "out")]
    for given, message in {
        "4": "found '4', expected a share and tokens, such as 0.4@65536",
        "0": "found '0', expected a share",
        "0.4@": "found '0.4@', expected a share",
        "0.4:queries=4/x": "queries: found 'x', expected a whole number",
        "0.4:queries=3": "found 3, expected 2, 4, 8, 16, 64",
    }.items():
        odd = CliRunner().invoke(app, [*arguments, "--prefill", given])
        assert odd.exit_code == 2 and message in odd.output.replace("\n", " "), odd.output
    alone = CliRunner().invoke(app, [*arguments, "--decode", "0.9"])
    assert alone.exit_code == 2 and "--decode needs --prefill" in alone.output
    arguments += ["--prefill", "0.4@65536:queries=4/8,prices=glm-5-tp8", "--decode", "0.99", "--retain", "1/3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "64K: prefill speed for as many tokens, by the times of glm-5-tp8 (8 heads" in result.output
    assert "--prefill: reckoned as glm-5-tp8, which this model is not: 4 attention heads, not 8 a rank" in result.output
    for name in ("report.html", "README.md"):  # both name the GPU and SGLang of the times
        page = (tmp_path / "out" / name).read_text()
        assert "NVIDIA H100 80GB HBM3, SGLang 0.5.17" in page and "which this model is not (4 attention heads" in page
    refused = CliRunner().invoke(app, [*arguments[:-6], "--prefill", "0.4", "--output", str(tmp_path / "other")])
    assert refused.exit_code == 2 and "or prices=glm-5-tp8 to reckon by that one all the same" in refused.output
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml")
    assert file.search is not None and file.search.prefill is not None
    assert (file.search.prefill.share, file.search.prefill.context) == (0.4, 65536)
    prices = LatencyTable.load("glm-5-tp8").at(65536)
    share = prices.prompt_share(file.as_pattern(), Pattern.full(6))
    assert share <= 0.4
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["held_out"]["rows"]
    named = {row["name"]: row for row in rows if row["kind"] == "named"}
    assert list(named)[:2] == ["lazy", "lazy, in time"] and named["lazy, in time"]["pattern"] == file.pattern
    assert named["lazy, in time"]["prefill"] == pytest.approx(share, abs=1e-4) and rows[0]["prefill"] == 1
    assert PatternFile.load(tmp_path / "out" / "pattern.yaml@1/3").pattern == named["lazy"]["pattern"]
    spec = PatternSpec.read(str(tmp_path / "out" / "pattern.yaml"))
    own, *others = spec.by_retention(describe(tiny_config(), "tiny"), [Fraction(1, 3)])
    assert own[1] == file.as_pattern() and [kept for kept, _ in others] == [Fraction(1, 3)]
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0 and PatternFile.load(tmp_path / "out" / "pattern.yaml") == file
