"""Price tables: those of the package agree with whole prompts, and files are read or refused in a line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from indexcache_search.errors import SearchError
from indexcache_search.prices.table import BY_ARCHITECTURE, TABLES, PriceTable, known, prices_of
from indexcache_search.search.settings import BLOCKS
from scripts.bench.serving.layer_times import cumulated
from scripts.bench.serving.prices import of_all_kinds
from sglang_indexcache import Pattern


@pytest.mark.parametrize("name", known())
def test_sums_of_a_table_are_whole_prompts_within_five_percent(name: str) -> None:
    table = PriceTable.load(name)
    assert table.name == name and len(table.checks) >= 4
    for check in table.checks:
        pattern, prices = Pattern.parse(check.pattern), table.at(check.context)
        assert len(pattern) == table.layers
        assert prices.prompt_ms(pattern) == pytest.approx(check.measured_ms, rel=0.05)
        assert prices.prompt_ms(pattern) == pytest.approx(check.expected_ms, abs=0.2)
        assert prices.prompt_ms(Pattern.full(table.layers)) == pytest.approx(check.plain_ms, rel=0.001)


@pytest.mark.parametrize("name", known())
def test_larger_blocks_take_no_longer(name: str) -> None:
    table = PriceTable.load(name)
    for context in table.contexts:
        prices = table.at(context)
        for rows in (prices.full, prices.shared):
            times = [rows[queries] for queries in sorted(rows)]
            assert all(later <= 1.05 * earlier for earlier, later in pairwise(times))
        assert all(prices.shared[queries] < prices.full[queries] for queries in prices.full)
        assert prices.decode_shared < prices.decode_full
        assert set(BLOCKS) < set(prices.full)


def test_contexts_between_the_measured_ones_follow_a_power_law() -> None:
    table = PriceTable.load("glm-5-tp8")
    low, middle, high = (table.at(context) for context in (65536, 92682, 131072))
    for queries in middle.full:
        assert middle.full[queries] == pytest.approx((low.full[queries] * high.full[queries]) ** 0.5, rel=1e-4)
    assert low.rest <= middle.rest <= high.rest
    for context in (16383, 131073):
        with pytest.raises(SearchError, match=f"{context} tokens have no price in glm-5-tp8, expected 16384 to 131072"):
            table.at(context)


def test_models_have_the_prices_of_their_architecture() -> None:
    assert {name: prices.table for name in BY_ARCHITECTURE if (prices := prices_of(name))} == BY_ARCHITECTURE
    assert prices_of("DeepseekV4ForCausalLM") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "indexcache-prices/v2"}, "schema: Input should be 'indexcache-prices/v1'"),
        ({"contexts": [16384, 16384, 65536, 131072]}, "the file: contexts do not rise"),
        ({"contexts": [16384]}, "the file: found a row of another length, expected 1 times in each"),
        (
            {"decode": {"full_ms": [0.0] * 4, "shared_ms": [1.0] * 4}},
            "decode.full_ms.0: Input should be greater than 0",
        ),
        ({"price": 1}, "price: Extra inputs are not permitted"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = json.loads((TABLES / "glm-5-tp8.json").read_text())
    file = tmp_path / "own.json"
    file.write_text(json.dumps(content))
    assert PriceTable.load(str(file)) == PriceTable.load("glm-5-tp8")
    file.write_text(json.dumps(content | change))
    with pytest.raises(SearchError, match=message) as error:
        PriceTable.load(str(file))
    assert "\n" not in str(error.value)


def test_layers_of_all_kinds_and_their_times(tmp_path: Path) -> None:
    pattern = of_all_kinds(16)
    assert pattern.letters == "FFFSFSFSFSFSFSFF+4q2+6q4+8q8+10q16+12q64"
    file = tmp_path / "times.jsonl"
    file.write_text("".join(json.dumps({"tokens": 8, "ms": [i, 10 * i]}) + "\n" for i in range(10)))
    assert cumulated(file, 2, 2) == [[[6, 13], [60, 130]], [[8, 17], [80, 170]]]
