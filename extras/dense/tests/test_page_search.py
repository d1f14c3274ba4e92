"""Searches for D, F and S within the bytes of a decode step: what is found where the optimum is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_dense.strategies.byte_budget import ByteBudget, ByteShare
from indexcache_dense.strategies.page_bytes import PageBytes, PageGoal
from indexcache_dense.strategies.page_search import PageSearch
from indexcache_search.cli.search import app
from indexcache_search.errors import SearchError
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies import strategy_of
from indexcache_search.strategies.base import Goal, Outcome
from sglang_indexcache import ModelLayers, Pattern, PatternFile
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.io.errors import PatternFileError
from tests.conftest import tiny_config, tiny_dense_config
from tests.search.test_strategies import TableEngine, found_by, judge_of, token_set

SELECTION = Selection(page_tokens=16, pages=4, recent_pages=1, sink_pages=0, score="compressed_keys")
BYTES = PageBytes(selection=SELECTION, context=1024)


def test_bytes_are_those_of_keys_values_and_digests() -> None:
    """Means are of 16 keys, which are half of keys and values; rounded keys have 4 of 16 bits, and a range of 32."""
    means, pages, everything = 1024 / 32, 64, 1024
    assert BYTES.step(Pattern("DDDD", SELECTION)) == 4 * everything and BYTES.share(Pattern("DD", SELECTION)) == 1
    assert BYTES.step(Pattern("DDSF", SELECTION)) == 2 * everything + means + pages + (means + pages)
    by_attention = replace(BYTES, selection=replace(SELECTION, score="token_max"))
    assert by_attention.step(Pattern("DDSS", SELECTION)) == 2 * everything + 512 + 2 * pages
    rounded = replace(BYTES, selection=replace(SELECTION, score="rounded_keys"))
    assert rounded.step(Pattern("DSFD", SELECTION)) == 2 * everything + 2 * (512 * (4 + 1 / 4) / 16) + 2 * pages
    held = replace(BYTES, selection=replace(SELECTION, steps=ReusePolicy.parse("refresh:4")))
    assert held.step(Pattern("F", SELECTION)) == means / 4 + pages
    assert replace(BYTES, context=64).share(Pattern("DFSS", SELECTION)) == 1, "all is attended to, nothing is scored"


class Model:
    """Losses of patterns: what `F` and `S` cost in each layer, `S` the more the farther its source is."""

    def __init__(self, seed: int, layers: int = 6) -> None:
        draw = random.Random(seed)
        self.own = [draw.lognormvariate(0, 1.5) for _ in range(layers)]
        self.shared = [draw.lognormvariate(1, 1.5) for _ in range(layers)]
        self.native = Pattern("D" * layers, SELECTION)

    def loss(self, pattern: Pattern, row: int = 0) -> float:
        far = [layer - source for layer, source in enumerate(pattern.source_layers)]
        return (
            5.0
            + sum(self.own[layer] for layer in pattern.own_layers)
            + sum(self.shared[layer] * far[layer] ** 0.5 for layer in pattern.shared_layers)
        )

    def everything(self, share: float) -> Iterator[Pattern]:
        for roles in itertools.product("DF", *["DFS"] * (len(self.native) - 1)):
            pattern = Pattern("".join(roles), SELECTION)
            if BYTES.share(pattern) <= share + 1e-9:
                yield pattern


def search(model: Model, share: float) -> tuple[Pattern, Outcome]:
    goal = Goal(native=model.native, full_layers={Fraction(1, 3): 2}, budget=PageGoal(share=share, bytes=BYTES))
    judge = judge_of(TableEngine(model.loss), token_set(16), race=True)
    outcome, _ = found_by(PageSearch(), goal, judge)
    assert outcome.within_budget is not None
    return outcome.within_budget, outcome


def test_what_is_found_reads_no_more_and_is_nearly_always_the_best() -> None:
    best, letters = 0, set[str]()
    for seed, share in itertools.product(range(12), (0.2, 0.45, 0.7)):
        model = Model(seed)
        found, outcome = search(model, share)
        least = min(map(model.loss, model.everything(share)))
        assert BYTES.share(found) <= share and least <= model.loss(found) + 1e-9
        assert outcome.patterns[Fraction(1, 3)].roles.count("D") == 2 and len(outcome.steps) == 4
        best += model.loss(found) == pytest.approx(least)
        letters |= set(found.roles)
    assert best >= 30, best  # of 36
    assert letters == {"D", "F", "S"}


def bytes_of(share: float, context: int) -> ByteBudget:
    return ByteBudget(share=ByteShare(share, context))


def settings(**changes: Any) -> Settings:
    given = {"retain": (Fraction(1, 3),), "strategy": PageSearch(), "budget": bytes_of(0.4, 1024), **changes}
    return Settings(**given)


def test_goals_that_can_not_be() -> None:
    def described(selection: Selection) -> ModelLayers:
        return family_of("LlamaForCausalLM").checkpoint.selecting(describe(tiny_dense_config(), "tiny"), selection)

    dense = described(SELECTION)
    goal = settings().goal(dense)
    assert isinstance(goal.budget, PageGoal) and goal.budget.bytes == BYTES
    by_attention = described(replace(SELECTION, score="token_max"))
    for model, changes, message in (
        (by_attention, {}, "--bytes needs --selection score=compressed_keys or rounded_keys, which F layers select by"),
        (dense, {"budget": bytes_of(0.4, 64)}, "--bytes is of 64 tokens, expected more than the 64 of a selection"),
        (dense, {"budget": bytes_of(0.05, 1024)}, r"--bytes is 0.05, expected at least 0.068: what one F layer and S"),
        (describe(tiny_config(), "glm"), {}, "--bytes is about pages of dense models, the model has indexers"),
    ):
        with pytest.raises(SearchError, match=message):
            settings(**changes).goal(model)
    for asked in ({"name": "greedy"}, {"swaps": 4}):
        with pytest.raises(SearchError, match="--bytes needs --strategy lazy, without swaps"):
            strategy_of(budget=bytes_of(0.4, 1024), **asked)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("no_pictures")
def test_the_command_finds_d_f_and_s(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "found"
    selection = "score=compressed_keys,page_tokens=16,pages=4,recent_pages=1,sink_pages=0"
    arguments = ["--model", dense_folder, "--calibration", token_file, "--retain", "1/3", "--seq-len", "100"]
    arguments += ["--selection", selection, "--bytes", "0.3@1024", "--output", output, "--device", "cpu"]
    arguments += ["--num-sequences", "3", "--num-eval-sequences", "3"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    file = PatternFile.load(output / "pattern.yaml")
    pattern = file.as_pattern()
    assert BYTES.share(pattern) <= 0.3 and file.search is not None and file.search.bytes is not None
    assert (file.search.bytes.share, file.search.bytes.context) == (0.3, 1024)
    text = file.dumps()
    for before, after, message in (
        ("share: 0.3", "share: 1.3", "search.bytes.share"),
        ("context: 1024", "context: -1", "search.bytes.context"),
        ("context: 1024", "tokens: 1024", "search.bytes"),
    ):
        assert text.count(before) == 1
        with pytest.raises(PatternFileError, match=message):
            PatternFile.loads(text.replace(before, after))
    assert f"bytes  {pattern.roles}" in result.output and "lazy, in bytes" in (output / "README.md").read_text()
