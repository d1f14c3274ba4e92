"""Searches over what indexers cost: prices, the knapsack, and what is found where the optimum is known."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from indexcache_search.cli import app
from indexcache_search.errors import SearchError
from indexcache_search.settings import Settings
from indexcache_search.strategies import priced
from indexcache_search.strategies.base import Goal
from indexcache_search.strategies.priced import Lightened, Priced, with_indexers
from indexcache_search.strategies.prices import GATHERED, Prices, candidate_price, price
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.errors import PatternError, PatternFileError
from sglang_indexcache.families import describe
from sglang_indexcache.indexers import Indexer
from sglang_indexcache.pattern_file import ModelSection
from tests.conftest import tiny_config, tiny_dense_config
from tests.test_strategies import TableEngine, found_by, judge_of, token_set

PRICES = Prices(queries={1: 1.0, 4: 0.25, 16: 0.0625})
ALL_PRICES = Prices(queries=PRICES.queries, candidates={2: 0.125, 4: 0.25}, selecting={2: 0.125, 4: 0.375})


def with_queries(pattern: Pattern, queries: dict[int, int]) -> Pattern:
    return with_indexers(
        pattern, [Indexer(layer=layer, queries=number) for layer, number in queries.items() if number > 1]
    )


def test_prices_count_scores() -> None:
    context, exact = 1000, 128
    for queries in (2, 4, 16):
        keys = sum(t for t in range(context) if t >= context - exact)
        keys += sum(t for t in range(context - exact)) / queries
        assert price(queries, context) == pytest.approx(keys / sum(range(context)), rel=2e-3)
    assert price(16, 10**6) == pytest.approx(1 / 16, rel=0.01)
    pattern = Pattern.parse("FSFFSS+2q4+3q16")
    assert PRICES.cost(pattern) == 1 + 0.25 + 0.0625 == pattern.scored_layers


def test_prices_of_candidates_count_gathered_keys() -> None:
    topk, context = 50, 10_000
    for count in (2, 4, 64):
        keys = sum(min(t, GATHERED * count * topk) for t in range(context))
        assert candidate_price(count, topk, context) == pytest.approx(keys / sum(range(context)), rel=1e-3)
    assert candidate_price(4, 2048, 131072) == pytest.approx(0.39, abs=0.01)  # 0.22 of the last 8,192 queries alone
    assert Prices.at(131072, 2048, (), (4,)).selecting == {4: 0.44}
    pattern = Pattern.parse("FCFSCC+1c2+4c2+5c4")
    assert ALL_PRICES.cost(pattern) == 2 + 0.125 + 0.375 + 2 * 0.125 + 0.25


class Model:
    """Losses of patterns of five layers: what each `S` and each block of queries costs by itself, more with reuse."""

    def __init__(self, seed: int, layers: int = 5) -> None:
        draw = random.Random(seed)
        self.shared = [draw.lognormvariate(0, 1.5) for _ in range(layers)]
        self.blocks = {(layer, n): draw.lognormvariate(-2, 1.5) * n for layer in range(layers) for n in (4, 16)}
        self.native = Pattern.full(layers)

    def loss(self, pattern: Pattern, row: int = 0) -> float:
        reused = [sum(source == layer for source in pattern.source_layers) for layer in range(len(pattern))]
        less = 0.0
        for item in pattern.indexers:
            if item.candidates:  # better than sharing
                less += self.shared[item.layer] * (0.5 if item.candidates == 2 else 0.1)
            else:
                less += self.blocks[item.layer, item.queries] * reused[item.layer]
        return 5.0 + sum(self.shared[layer] for layer in pattern.shared_layers) + less

    def everything(self, budget: float) -> Iterator[Pattern]:
        """All patterns that cost at most `budget`."""
        for kinds in itertools.product((0, 1, 4, 16), repeat=len(self.native) - 1):
            for first in (1, 4, 16):
                queries = [first, *kinds]
                pattern = self.native.keeping(layer for layer, number in enumerate(queries) if number)
                pattern = with_queries(pattern, {layer: number for layer, number in enumerate(queries) if number})
                if PRICES.cost(pattern) <= budget:
                    yield pattern


def search(
    model: Model, budget: int, most_full: int | None = None, prices: Prices = PRICES
) -> tuple[Pattern, Pattern, list[str]]:
    """What is found, the best of F and S alone, and what was noticed."""
    retention = Fraction(budget, 5)
    goal = Goal(native=model.native, full_layers={retention: budget}, prices=prices, most_full=most_full)
    judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
    outcome, notices = found_by(Priced(), goal, judge)
    return outcome.patterns[retention], outcome.plain[retention], notices


def test_what_is_found_costs_no_more_and_is_nearly_always_the_best() -> None:
    best = 0
    for seed, budget in itertools.product(range(12), (1, 2)):
        model = Model(seed)
        found, plain, notices = search(model, budget)
        least = min(map(model.loss, model.everything(budget)))
        assert PRICES.cost(found) <= budget and not plain.indexers and len(plain.full_layers) == budget
        assert least <= model.loss(found) <= model.loss(plain)
        best += model.loss(found) == pytest.approx(least)
        assert "indexers that score less on" in notices[-1]
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
            patch.setattr(priced, "LOOKS", 1)
            worse += model.mean(search(model, 2)[0]) > model.mean(found) + 1e-9
            assert model.mean(search(model, 2)[0]) >= model.mean(found) - 1e-9
    assert best >= 10 and worse >= 6, (best, worse)


def test_decoding_limits_the_layers_that_choose() -> None:
    best = 0
    for seed in range(12):
        model = Model(seed)
        found, _, _ = search(model, 1, most_full=2)
        assert len(found.full_layers) <= 2 and PRICES.cost(found) <= 1
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
        lightened = Lightened(pattern, judge, PRICES, model.native)
        for budget in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
            options = [
                candidate
                for kinds in itertools.product((1, 4, 16), repeat=4)
                if PRICES.cost(candidate := with_queries(pattern, dict(enumerate(kinds)))) <= budget
            ]
            found = lightened.within(budget)
            assert found is not None and PRICES.cost(found) <= budget
            assert model.loss(found) == pytest.approx(min(map(model.loss, options)))
        assert lightened.within(0.2) is None and lightened.within(4.0) == pattern


def with_candidates(pattern: Pattern) -> Iterator[Pattern]:
    """`pattern` with every choice of `C` layers and blocks that it can have."""
    options: list[list[Indexer | None]] = []
    for layer, role in enumerate(pattern.roles):
        own = [Indexer(layer=layer, queries=number) for number in (4, 16)]
        options.append(
            [None, *(own if role == "F" else [Indexer(layer=layer, candidates=number) for number in (2, 4)])]
        )
    for items in itertools.product(*options):
        with contextlib.suppress(PatternError):
            yield with_indexers(pattern, filter(None, items))


def test_the_knapsack_is_exact_with_candidates() -> None:
    for seed in range(12):
        model = Model(seed)
        pattern = Pattern("FSFSS")
        judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
        lightened = Lightened(pattern, judge, ALL_PRICES, model.native)
        same = [
            item
            for item in with_candidates(pattern)
            if all(
                len({i.candidates for i in item.indexers if i.candidates and item.scorer(i.layer) == f}) < 2
                for f in (0, 2)
            )
        ]  # layers that choose from one F have equally many candidates
        for budget in (0.125, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
            found = lightened.within(budget)
            assert found is not None and ALL_PRICES.cost(found) <= budget
            least = min(model.loss(item) for item in same if ALL_PRICES.cost(item) <= budget)
            assert model.loss(found) == pytest.approx(least), (seed, budget)


def test_locked_layers_choose_from_nobody() -> None:
    model = Model(0)
    judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
    found = Lightened(Pattern("FSSSS"), judge, ALL_PRICES, Pattern("FFSFF")).within(4.0)
    assert found is not None and found.roles == "FCSCC"


def test_what_is_found_with_candidates_is_nearly_always_the_best() -> None:
    best = 0
    for seed, budget in itertools.product(range(8), (1, 2)):
        model = Model(seed)
        found, plain, _ = search(model, budget, prices=ALL_PRICES)
        everything = [
            item
            for kinds in itertools.product("FS", repeat=4)
            for item in with_candidates(Pattern("F" + "".join(kinds)))
            if ALL_PRICES.cost(item) <= budget
        ]
        least = min(map(model.loss, everything))
        assert ALL_PRICES.cost(found) <= budget and least <= model.loss(found) <= model.loss(plain)
        best += model.loss(found) == pytest.approx(least)
    assert best >= 12  # of 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (3,)}, "--queries has 3, expected 2, 4, 8, 16, 64, at most 8"),
        ({"queries": (16,)}, "--queries has 16"),  # index_topk is 8
        ({"queries": (4,), "price_context": 128}, "--price-context is 128, expected more than 128"),
        ({"queries": (4,), "strategy": "greedy"}, "--queries needs --strategy lazy, without --swaps"),
        ({"queries": (4,), "swaps": 4}, "without --swaps"),
        ({"decode_retain": Fraction(1, 2)}, "--decode-retain is about patterns with --queries or --rescore"),
        ({"rescore": (1,)}, "--rescore has 1, expected 2 to 64"),
        ({"rescore": (65,)}, "--rescore has 65"),
        ({"rescore": (4,), "strategy": "greedy"}, "--rescore needs --strategy lazy, without --swaps"),
        (
            {"queries": (4,), "decode_retain": Fraction(1, 3)},
            "--decode-retain is 1/3, expected no less than --retain 1/2",
        ),
    ],
)
def test_what_can_not_be_priced_is_refused(change: dict[str, object], message: str) -> None:
    settings = Settings((Fraction(1, 2),), **change)  # type: ignore[arg-type]
    with pytest.raises(SearchError, match=message):
        settings.goal(describe(tiny_config(), "tiny"))


def test_dense_models_have_no_indexers_to_price() -> None:
    with pytest.raises(SearchError, match="--queries is about indexers, the model is dense"):
        Settings((Fraction(1, 2),), queries=(4,)).goal(describe(tiny_dense_config(), "tiny"))


def test_a_file_says_what_was_found_and_no_more_than_its_share() -> None:
    model = describe(tiny_config(), "tiny")
    section = ModelSection.of(model)
    patterns = {"1/2": "FFFFSS+0q4+1q4", "1/3": "FSFSSF+0q4"}
    content = {"schema": "indexcache/v1", "model": section, "retention": 4 / 6, "pattern": patterns["1/2"]}
    file = PatternFile(**content, patterns=patterns | {"1/3": "FSFSSF+0q2+2q2"})
    assert PatternFile.loads(file.dumps()) == file
    with pytest.raises(PatternFileError, match=r"patterns.1/3: found 2.25 F layers, expected 2 of 6"):
        PatternFile.loads(file.dumps().replace("FSFSSF+0q2+2q2", patterns["1/3"]))


def test_a_search_from_the_command_line(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model_folder), "--calibration", str(token_file), "--seq-len", "32"]
    arguments += ["--num-sequences", "8", "--num-eval-sequences", "6", "--queries", "4,8", "--price-context", "4096"]
    refused = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "refused")])
    assert refused.exit_code == 2 and "expected --reply" in refused.output
    odd = CliRunner().invoke(app, [*arguments, "--queries", "4,x", "--output", str(tmp_path / "refused")])
    assert odd.exit_code == 2 and "--queries is '4,x', expected numbers like 4,16" in odd.output
    arguments += ["--reply", "12", "--retain", "1/3", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml@1/3")
    assert file.as_pattern().scored_layers <= 2.001
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["held_out"]["rows"]
    names = [row["name"] for row in rows if row["kind"] == "named"]
    assert names[:2] == ["lazy", "lazy, F and S"] and rows[1]["pattern"] == file.pattern
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0 and PatternFile.load(tmp_path / "out" / "pattern.yaml@1/3") == file
