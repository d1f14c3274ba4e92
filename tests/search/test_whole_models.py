"""Latency tables of whole models: what lies is refused, and formulas are shown as such."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexcache_search.errors import SearchError
from indexcache_search.searching.settings import Budget, TimeBudget
from indexcache_search.strategies.budget.table import TABLES, LatencyTable
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe
from tests.search.made_tables import whole_table

GLM_5 = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 78, "index_topk": 2048}


def written(content: dict[str, Any], folder: Path) -> str:
    file = folder / "table.json"
    file.write_text(json.dumps(content))
    return str(file)


def test_a_whole_model_takes_experts_and_what_ranks_send() -> None:
    """Every figure by hand: 10 ms an F, 8 an S, 100 beside; 2 dense layers are 1 ms shorter; the model has 3."""
    table = LatencyTable.model_validate(whole_table())
    sent = 7 / 8 * 1000 * 49152 / 400e9 * 1e3
    prices = table.at(1000)
    assert prices.whole and prices.prompt_ms(Pattern("FSSF")) == pytest.approx(2 * 10 + 2 * 8 + 4 * sent + 100 - 3)
    assert prices.decode_ms(Pattern("FSSF")) == pytest.approx(2 * 0.2 + 2 * 0.1 + 4 * 0.05)
    alone = table.as_measured(1000)
    assert alone.prompt_ms(Pattern("FSSF")) == pytest.approx(2 * 10 + 2 * 8 + 100 - 2)
    assert alone.decode_ms(Pattern("FSSF")) == pytest.approx(0.6)
    longer, middle = table.at(4000), table.at(2000)
    assert longer.full[1] == pytest.approx(40 + 4 * sent) and middle.full[1] == pytest.approx(20 + 2 * sent)


def test_shares_of_whole_models_are_larger_than_those_of_layers_alone() -> None:
    content = whole_table()
    whole, plan = LatencyTable.model_validate(content).at(1000), Pattern("FSSS" * 20)
    measured = LatencyTable.model_validate(content).as_measured(1000)
    native = Pattern.full(80)
    assert whole.prompt_share(plan, native) > measured.prompt_share(plan, native)


@pytest.mark.parametrize(
    ("collectives", "shown"),
    [
        (None, "what ranks send: formula: 7/8 of 49,152 bytes a token and layer at 400 GB/s, which 2 GPUs reached"),
        ("measured", "what ranks send: measured"),
        ("unknown", "what ranks send: unknown"),
    ],
)
def test_what_is_measured_and_what_is_a_formula_is_said_where_a_table_is_named(
    collectives: str | None, shown: str
) -> None:
    content = whole_table()
    content["whole"] |= {} if collectives is None else {"collectives": collectives}
    table = LatencyTable.model_validate(content)
    assert shown in str(table) and "whole model of 78 layers on TP 8: six layers measured" in str(table)
    assert table.at(1000).words == str(table)
    if collectives is not None:
        assert table.at(1000).full[1] == pytest.approx(10)


def test_tables_of_layers_alone_say_so_and_are_read_as_before() -> None:
    content = json.loads((TABLES / "glm-5-tp8.json").read_text())
    assert content["schema"] == "indexcache-prices/v1"
    table = LatencyTable.load("glm-5-tp8")
    assert "layers alone, without experts and all-reduces" in str(table) and not table.at(16384).whole
    assert table.at(16384) == table.as_measured(16384)
    assert table.at(16384).full[1] == content["prompt"]["full_ms"]["1"][0]


def changed(*keys: str, to: Any = None) -> Callable[[dict[str, Any]], None]:
    """Return what sets a value of a table, or removes it."""

    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        if to is None:
            del content[keys[-1]]
        else:
            content[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("whole"), "the file: whole is missing, and the schema indexcache-prices/v2"),
        (changed("schema", to="indexcache-prices/v1"), "whole is there, and the schema indexcache-prices/v1"),
        (changed("schema", to="indexcache-prices/v3"), "schema: Input should be 'indexcache-prices/v1' or"),
        (changed("whole", "label"), "whole.label: Field required"),
        (changed("whole", "label", to=" "), "whole.label: String should match"),
        (changed("whole", "expert_ms", to=[2.0]), "found a row of another length, expected 2 times in each"),
        (changed("whole", "dense_ms", to=[1.0] * 3), "found a row of another length, expected 2 times in each"),
        (changed("whole", "expert_ms", to=[-2.0, 8.0]), "whole.expert_ms.0: Input should be greater than 0"),
        (changed("whole", "expert_ms", to=[float("nan"), 8.0]), "whole.expert_ms.0: Input should be"),
        (changed("whole", "dense_ms", to=[float("inf"), 8.0]), "whole.dense_ms.0: Input should be a finite number"),
        (changed("whole", "expert_ms", to=[2.0, 33.0]), "expert_ms of whole is no part of a layer's time"),
        (changed("whole", "dense_layers", to=79), "found 79 dense layers of 78"),
        (changed("whole", "measured_dense_layers", to=7), "found 7 dense layers of 6"),
        (changed("whole", "cp", to=3), "cp 3 does not divide tp 8"),
        (changed("whole", "tp", to=4), "collectives are of 8 ranks, expected 4"),
        (changed("whole", "collectives", to="guessed"), "whole.collectives"),
        (changed("whole", "collectives"), "whole.collectives: Field required"),
        (changed("whole", "collectives", "gb_s", to=-1.0), "gb_s: Input should be greater than 0"),
        (changed("whole", "collectives", "ranks", to=1), "ranks: Input should be greater than or equal to 2"),
        (changed("whole", "collectives", "step_ms"), "step_ms: Field required"),
        (changed("whole", "derived_from", to="other"), "checks are there, of times that were computed"),
        (changed("whole", "more", to=1), "whole.more: Extra inputs are not permitted"),
    ],
)
def test_a_table_that_lies_is_refused_in_a_line(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    content = whole_table()
    LatencyTable.load(written(content, tmp_path))
    change(content)
    with pytest.raises(SearchError) as error:
        LatencyTable.load(written(content, tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("context", [999, 4001])
def test_a_context_outside_is_refused(context: int) -> None:
    table = LatencyTable.model_validate(whole_table())
    for refused in (table.at, table.as_measured):
        with pytest.raises(SearchError, match=f"{context} tokens are outside of the latency table made, expected 1000"):
            refused(context)


def test_a_model_with_other_experts_is_unlike(tmp_path: Path) -> None:
    file = written(whole_table(), tmp_path)
    table, model = LatencyTable.load(file), describe(GLM_5, "a/model")
    assert table.unlike(model) == ""
    other = describe({**GLM_5, "num_experts_per_tok": 4}, "a/model")
    assert table.unlike(other) == "num_experts_per_tok 4, not 8"
    assert "which this model is not (num_experts_per_tok 4, not 8)" in Budget(0.5, 1000, file).prices(other).words


def test_a_table_without_blocks_finds_patterns_of_f_and_s(tmp_path: Path) -> None:
    """Servers with context parallelism refuse blocks: a search by such a table must not choose any."""
    content = whole_table()
    for kind in ("full_ms", "shared_ms"):
        content["prompt"][kind] = {"1": content["prompt"][kind]["1"]}
    file, model = written(content, tmp_path), describe(GLM_5, "a/model")
    assert TimeBudget(prefill=Budget(0.9, 1000, file)).goal(model).queries == ()
    content = whole_table()
    with pytest.raises(SearchError, match="queries has 2, but made has times of 4"):
        TimeBudget(prefill=Budget(0.9, 1000, written(content, tmp_path))).goal(model)
