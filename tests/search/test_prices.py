"""Price tables: those of the package agree with whole prompts, and files are read or refused in a line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from indexcache_search import demo
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import Place
from indexcache_search.hf.loading import describe_model
from indexcache_search.searching.settings import BLOCKS, Budget
from indexcache_search.strategies.budget.pricing import BY_ARCHITECTURE, column, priced, table_of
from indexcache_search.strategies.budget.table import TABLES, LatencyTable, known
from indexcache_speed.estimate import prices_at
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.families import describe


@pytest.mark.parametrize("name", known())
def test_sums_of_a_table_are_whole_prompts_within_five_percent(name: str) -> None:
    table = LatencyTable.load(name)
    derived = table.whole is not None and table.whole.derived_from is not None
    assert table.name == name and (derived or len(table.checks) >= 4)
    for check in table.checks:
        pattern, prices = Pattern.parse(check.pattern), table.as_measured(check.context)
        assert len(pattern) == table.layers
        assert prices.prompt_ms(pattern) == pytest.approx(check.measured_ms, rel=0.05)
        assert prices.prompt_ms(pattern) == pytest.approx(check.expected_ms, abs=0.2)
        assert prices.prompt_ms(Pattern.full(table.layers)) == pytest.approx(check.plain_ms, rel=0.001)


@pytest.mark.parametrize("name", known())
def test_larger_blocks_take_no_longer(name: str) -> None:
    table = LatencyTable.load(name)
    for context in table.contexts:
        prices = table.at(context)
        for rows in (prices.full, prices.shared):
            times = [rows[queries] for queries in sorted(rows)]
            assert all(later <= 1.05 * earlier for earlier, later in pairwise(times))
        assert all(prices.shared[queries] < prices.full[queries] for queries in prices.full)
        assert prices.decode_shared < prices.decode_full
        assert set(BLOCKS) < set(prices.full) or not prices.has_blocks


def test_contexts_between_the_measured_ones_follow_a_power_law() -> None:
    table = LatencyTable.load("glm-5-tp8")
    low, middle, high = (table.at(context) for context in (65536, 92682, 131072))
    for queries in middle.full:
        assert middle.full[queries] == pytest.approx((low.full[queries] * high.full[queries]) ** 0.5, rel=1e-4)
    assert low.rest <= middle.rest <= high.rest
    for context in (16383, 131073):
        with pytest.raises(
            SearchError, match=f"{context} tokens are outside of the latency table glm-5-tp8, expected 16384 to 131072"
        ):
            table.at(context)


# -- which table prices a model


def described(architecture: str, **changes: Any) -> ModelLayers:
    """A model that has the shape of its architecture, but for `changes`."""
    return describe(
        {"architectures": [architecture], "num_hidden_layers": 12, "index_topk": 2048, **changes}, "a/model"
    )


def ignored(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("architecture", BY_ARCHITECTURE)
def test_models_of_a_known_shape_have_the_prices_of_their_architecture(architecture: str) -> None:
    prices = column(described(architecture), ignored)
    assert prices is not None and prices.table == BY_ARCHITECTURE[architecture] and not prices.unlike
    assert "H100" in prices.words and "SGLang 0.5.17" in prices.words and "index_topk 2048" in prices.words
    smaller = described(architecture, num_attention_heads=16)  # a rank of others, which has them on fewer GPUs
    assert column(smaller, ignored) == prices


def test_a_whole_model_has_the_table_of_the_whole() -> None:
    """Its prompt has experts and all-reduces, too; a model of another shape, with as many layers, has no such table."""
    table = table_of(described("GlmMoeDsaForCausalLM", num_hidden_layers=78))
    assert table is not None and table.name == "glm-5-tp8-h200" and table.whole is not None
    assert table_of(described("GlmMoeDsaForCausalLM", num_hidden_layers=77)) == LatencyTable.load("glm-5-tp8")
    with pytest.raises(SearchError, match=r"the times of glm-5-tp8 .* index_n_heads 64, not 32"):
        table_of(described("GlmMoeDsaForCausalLM", num_hidden_layers=78, index_n_heads=64))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index_topk": 8}, "index_topk 8, not 2048"),
        ({"index_n_heads": 64}, "index_n_heads 64, not 32"),
        ({"num_attention_heads": 20}, "20 attention heads, not 8 a rank"),
        ({"index_head_dim": 64}, "index_head_dim 64, not 128"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "kv_lora_rank 256, not 512, qk_rope_head_dim 32, not 64"),
    ],
)
def test_a_model_of_another_shape_has_no_prices_unless_they_are_named(change: dict[str, Any], said: str) -> None:
    """A model of 6 layers and index_topk 8 had GLM-5's times without a word."""
    model, lines = described("GlmMoeDsaForCausalLM", **change), list[str]()
    assert column(model, lines.append) is None
    [line] = lines
    assert said in line and "the times of glm-5-tp8 (8 heads a rank" in line and "those of a/model" in line
    assert "expected prices=FILE, a table of its shape, or prices=glm-5-tp8" in line
    for refused in (lambda: prices_at(model, [16384], None), lambda: Budget(0.5, 131072).prices(model)):
        with pytest.raises(SearchError, match=f"those of a/model, which has {said}"):
            refused()
    for prices in (prices_at(model, [16384], "glm-5-tp8")[0], Budget(0.5, 131072, "glm-5-tp8").prices(model)):
        assert prices.unlike == said and prices.words.endswith(f", which this model is not ({said})")


def test_the_demo_stands_in_for_models_of_a_table() -> None:
    """Also as a copy, and with other numbers in its name: it is known by its config.json."""
    model = describe_model(str(demo.MODEL))
    prices = column(replace(model, name="a copy"), ignored)
    assert prices is not None and prices.table == demo.TIMED_AS
    assert "which this model is not (4 attention heads, not 8 a rank, index_n_heads 8, not 32" in prices.words
    table = table_of(model)
    assert table is not None and priced(model, table, 16384).unlike == prices.unlike


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Place(), ""),
        (Place("NVIDIA H100 80GB HBM3", "0.5.17"), ""),
        (Place(None, "0.5.17"), ""),
        (Place("NVIDIA H200", None), "NVIDIA H200, not NVIDIA H100 80GB HBM3"),
        (Place("NVIDIA H100 80GB HBM3", "0.5.23"), "SGLang 0.5.23, not 0.5.17"),
        (Place("CPU", "0.5.23"), "CPU, not NVIDIA H100 80GB HBM3, SGLang 0.5.23, not 0.5.17"),
    ],
)
def test_times_of_another_device_or_sglang_say_so_where_they_are_shown(place: Place, said: str) -> None:
    """A search on an H200 showed the speeds of an H100 as its own."""
    model = described("GlmMoeDsaForCausalLM")
    prices, usual = column(model, ignored, place=place), column(model, ignored)
    assert prices is not None and usual is not None
    assert prices == replace(usual, words=usual.words + (f", while its servers have {said}" if said else ""))
    table = table_of(model)
    assert table is not None
    del table.versions["sglang"]
    assert "SGLang" not in table.elsewhere(place)


def test_models_of_other_architectures_have_none() -> None:
    model = describe_model(str(demo.MODEL))
    assert table_of(replace(model, architecture="DeepseekV4ForCausalLM", config_sha256="")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    assert LatencyTable.load(str(file)) == LatencyTable.load("glm-5-tp8")
    file.write_text(json.dumps(content | change))
    with pytest.raises(SearchError, match=message) as error:
        LatencyTable.load(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf{}", "begins with a byte order mark, which JSON must not; expected UTF-8 without one$"),
        (b"", "is empty; expected the whole file$"),
        (b'{"name": "x', "not JSON: is cut off before its end; expected the whole file$"),
        (b"[]", "found list, expected a JSON object$"),
    ],
)
def test_what_a_file_holds_instead_of_a_table_is_said(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(SearchError, match=f"^prices: {tmp_path}/x.json: {message}"):
        LatencyTable.load(str(tmp_path / "x.json"))
