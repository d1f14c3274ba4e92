"""Searches for blocks of queries: prices, the knapsack, and what is found where the optimum is known."""

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
from indexcache_search.search.settings import Settings
from indexcache_search.strategies import budget_search, strategy_of
from indexcache_search.strategies.base import Goal
from indexcache_search.strategies.budget_fit import BudgetFit, with_blocks
from indexcache_search.strategies.budget_search import BudgetSearch
from indexcache_search.strategies.prices import cost, price, prices_at
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.errors import PatternFileError
from sglang_indexcache.families import describe
from sglang_indexcache.files.pattern_file import ModelSection
from sglang_indexcache.pattern.indexer_setting import IndexerSetting
from tests.conftest import tiny_config, tiny_dense_config
from tests.search.test_strategies import TableEngine, found_by, judge_of, token_set

PRICES = {1: 1.0, 4: 0.25, 16: 0.0625}


def with_queries(pattern: Pattern, queries: dict[int, int]) -> Pattern:
    return with_blocks(
        pattern, [IndexerSetting(layer=layer, queries=number) for layer, number in queries.items() if number > 1]
    )


def test_prices_count_scores() -> None:
    context, exact = 1000, 128
    for queries in (2, 4, 16):
        keys = sum(t for t in range(context) if t >= context - exact)
        keys += sum(t for t in range(context - exact)) / queries
        assert price(queries, context) == pytest.approx(keys / sum(range(context)), rel=2e-3)
    assert price(16, 10**6) == pytest.approx(1 / 16, rel=0.01)
    pattern = Pattern.parse("FSFFSS+2q4+3q16")
    assert cost(pattern, PRICES) == 1 + 0.25 + 0.0625 == pattern.indexer_cost
    assert prices_at(1000, (16, 4, 4)) == {1: 1.0, 4: price(4, 1000), 16: price(16, 1000)}


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
        """All patterns that cost at most `budget`."""
        for kinds in itertools.product((0, 1, 4, 16), repeat=len(self.native) - 1):
            for first in (1, 4, 16):
                queries = [first, *kinds]
                pattern = self.native.keeping(layer for layer, number in enumerate(queries) if number)
                pattern = with_queries(pattern, {layer: number for layer, number in enumerate(queries) if number})
                if cost(pattern, PRICES) <= budget:
                    yield pattern


def search(model: Model, budget: int, most_full: int | None = None) -> tuple[Pattern, Pattern, list[str]]:
    """What is found, the best of F and S alone, and what was noticed."""
    retention = Fraction(budget, 5)
    goal = Goal(native=model.native, full_layers={retention: budget}, prices=PRICES, most_full=most_full)
    judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
    outcome, notices = found_by(BudgetSearch(), goal, judge)
    return outcome.patterns[retention], outcome.plain[retention], notices


def test_what_is_found_costs_no_more_and_is_nearly_always_the_best() -> None:
    best = 0
    for seed, budget in itertools.product(range(12), (1, 2)):
        model = Model(seed)
        found, plain, notices = search(model, budget)
        least = min(map(model.loss, model.everything(budget)))
        assert cost(found, PRICES) <= budget and not plain.indexers and len(plain.full_layers) == budget
        assert least <= model.loss(found) <= model.loss(plain)
        best += model.loss(found) == pytest.approx(least)
        assert "blocks of queries on" in notices[-1]
    assert best >= 21  # of 24: layers with cheap blocks need not be those that are dear to share


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
    best, worse = 0, 0
    for seed in range(12):
        model = Rare(seed, row)
        found, _, _ = search(model, 2)
        best += model.mean(found) == pytest.approx(min(map(model.mean, model.everything(2))))
        with monkeypatch.context() as patch:
            patch.setattr(budget_search, "LOOKS", 1)
            worse += model.mean(search(model, 2)[0]) > model.mean(found) + 1e-9
            assert model.mean(search(model, 2)[0]) >= model.mean(found) - 1e-9
    assert best >= 10 and worse >= 6, (best, worse)


def test_decoding_limits_the_layers_that_choose() -> None:
    best = 0
    for seed in range(12):
        model = Model(seed)
        found, _, _ = search(model, 1, most_full=2)
        assert len(found.full_layers) <= 2 and cost(found, PRICES) <= 1
        least = min(model.loss(item) for item in model.everything(1) if len(item.full_layers) <= 2)
        best += model.loss(found) == pytest.approx(least)
        free, _, _ = search(model, 1)
        assert model.loss(free) <= model.loss(found)
    assert best >= 11


def test_the_knapsack_is_exact() -> None:
    for seed in range(20):
        model = Model(seed, layers=4)
        pattern = Pattern("FFFF")
        judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
        fit = BudgetFit(pattern, judge, PRICES)
        for budget in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
            options = [
                option
                for kinds in itertools.product((1, 4, 16), repeat=4)
                if cost(option := with_queries(pattern, dict(enumerate(kinds))), PRICES) <= budget
            ]
            found = fit.within(budget)
            assert found is not None and cost(found, PRICES) <= budget
            assert model.loss(found) == pytest.approx(min(map(model.loss, options)))
        assert fit.within(0.2) is None and fit.within(4.0) == pattern


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (3,)}, "--queries has 3, expected 2, 4, 8, 16, 64, at most 8"),
        ({"queries": (16,)}, "--queries has 16"),  # index_topk is 8
        (
            {"decode_retain": Fraction(1, 2)},
            "--decode-retain is about patterns with --queries, without which --retain says it",
        ),
        (
            {"queries": (4,), "decode_retain": Fraction(1, 3)},
            "--decode-retain is 1/3, expected no less than --retain 1/2",
        ),
    ],
)
def test_what_can_not_be_priced_is_refused(change: dict[str, object], message: str) -> None:
    settings = Settings(retain=(Fraction(1, 2),), **change)  # type: ignore[arg-type]
    with pytest.raises(SearchError, match=message):
        settings.goal(describe(tiny_config(), "tiny"))


@pytest.mark.parametrize("asked", [{"name": "greedy"}, {"swaps": 4}], ids=str)
def test_only_lazy_without_swaps_looks_for_blocks(asked: dict[str, Any]) -> None:
    with pytest.raises(SearchError, match="--queries needs --strategy lazy, without swaps"):
        strategy_of(priced=True, **asked)


def test_dense_models_have_no_indexers_to_price() -> None:
    with pytest.raises(SearchError, match="--queries is about indexers, the model is dense"):
        Settings(retain=(Fraction(1, 2),), queries=(4,)).goal(describe(tiny_dense_config(), "tiny"))


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
    arguments += ["--num-sequences", "8", "--num-eval-sequences", "6", "--queries", "4,8:context=4096"]
    refused = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "refused")])
    assert refused.exit_code == 2 and "--queries needs --reply" in refused.output
    odd = CliRunner().invoke(app, [*arguments, "--queries", "4,x", "--output", str(tmp_path / "refused")])
    assert odd.exit_code == 2 and "'--queries': sizes: found 'x', expected a whole number" in odd.output
    odd = CliRunner().invoke(app, [*arguments, "--queries", "4:context=128", "--output", str(tmp_path / "refused")])
    assert odd.exit_code == 2 and "context: found 128, expected 129 to" in odd.output
    arguments += ["--reply", "12", "--retain", "1/3", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml@1/3")
    assert file.as_pattern().indexer_cost <= 2.001
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["held_out"]["rows"]
    names = [row["name"] for row in rows if row["kind"] == "named"]
    assert names[:2] == ["lazy", "lazy, F and S"] and rows[1]["pattern"] == file.pattern
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0 and PatternFile.load(tmp_path / "out" / "pattern.yaml@1/3") == file
