"""The scripts that measure latency tables: what they time, what they make of it, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from indexcache_search.strategies.budget.sections import Collectives
from indexcache_search.strategies.budget.table import LatencyTable
from scripts.bench.serving import rank_model
from scripts.bench.serving.all_reduce import bus_gb_s
from scripts.bench.serving.divide_prices import divided
from scripts.bench.serving.layer_times import cumulated, recorder
from scripts.bench.serving.price_table import KINDS, Measured, Shape, collectives, content_of, of_all_kinds
from scripts.bench.serving.rank_model import rank_config, rank_of, write
from sglang_indexcache import Pattern
from tests.search.made_tables import whole_table

ENGINE = {"kv_cache_dtype": "bfloat16", "chunked_prefill_size": 100}
REDUCED = {
    "ranks": 2,
    "hidden": 6144,
    "sizes": {"1": {"ms": 0.01, "bus_gb_s": 1.0}, "100": {"ms": 1, "bus_gb_s": 400.0}},
}
QUERIES = (1, 4)


def shape_of(folder: Path, gpus: int = 1, **engine: Any) -> Shape:
    config = rank_config(ranks=8, gpus=gpus, heads=None, layers=6, dtype="bf16")
    write(folder, config, rank_of(config, 8, gpus))
    return Shape.read(folder, ENGINE | engine, QUERIES)


# -- layers


class Clock:
    """Marks that are a millisecond apart."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> Any:
        self.now += 1
        at = self.now
        return SimpleNamespace(at=at, query=lambda: True, elapsed_time=lambda later: float(later.at - at))


def test_the_hook_writes_a_chunk_when_the_next_one_begins(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    hook = recorder({"file": str(file), "tokens": 8}, Clock())
    embedding, layer = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    layer.layer_id = 0  # type: ignore[assignment]
    for tokens in (8, 7, 9, 1):  # one is too short
        hook(embedding, (torch.zeros(tokens),), None)
        for _ in range(2 * 3):  # attention, and the layer
            hook(layer, (), None)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"tokens": tokens, "ms": [2.0] * 3, "behind_ms": [1.0] * 3} for tokens in (8, 9)]
    with pytest.raises(SystemExit, match="has 2 chunks, expected 3: do prompts run in CUDA graphs"):
        cumulated(file, 3, 1)


def test_times_of_layers_add_up_by_chunk(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    file.write_text("".join(json.dumps({"tokens": 8, "ms": [i, 10 * i]}) + "\n" for i in range(10)))
    assert cumulated(file, 2, 2) == [[[6, 13], [60, 130]], [[8, 17], [80, 170]]]


@pytest.mark.parametrize(
    ("layers", "queries", "letters"),
    [
        (16, (1, 2, 4, 8, 16, 64), "FFFSFSFSFSFSFSFF+4q2+6q4+8q8+10q16+12q64"),
        (9, (1,), "FFFSFSFSF"),
        (10, (1, 4), "FFFSFSFSFS+4q4+8q4"),
    ],
)
def test_layers_of_all_kinds(layers: int, queries: tuple[int, ...], letters: str) -> None:
    assert of_all_kinds(layers, queries).letters == letters


# -- tables


def measured(shape: Shape) -> Measured:
    """100 tokens: exact F 10 ms and S 8, blocks 6 and 5, experts 2 of each, a dense MLP 1; 7 ms beside the layers."""
    each = [9.0, 9.0, 10.0, 8.0, 6.0, 5.0]
    behind = [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    place = {"device": "NVIDIA H200", "versions": {"sglang": "0.5.23"}}

    def engine(prompt: float, step: float) -> dict[str, Any]:
        times = {"100": prompt, "200": 2 * prompt}
        return {
            "whole": {length: {"prefill_ms": [value] * 2, "decode_ms": [step]} for length, value in times.items()},
            **place,
        }

    kinds = engine(7 + sum(each), 1.0) | {
        "ms": [[[value, 2 * value] for value in each]] * 2,
        "behind_ms": [[[value, 2 * value] for value in behind]] * 2,
    }
    found = {KINDS: kinds, "plain": engine(7 + 2 * 9 + 4 * 10, 1.2), "plan": engine(7 + 9 + 8 - 1 + 2 * 10 + 8 + 8, 1)}
    conditions = {KINDS: of_all_kinds(6, QUERIES).letters, "plain": "", "plan": "FSFSFS"}
    return Measured(shape, [100, 200], conditions, found)


def test_a_table_of_what_was_measured(tmp_path: Path) -> None:
    content = content_of(measured(shape_of(tmp_path)), "mine", REDUCED, "by hand.")
    table = LatencyTable.model_validate(content)
    assert content["prompt"]["full_ms"] == {1: [10.0, 20.0], 4: [6.0, 12.0]}
    assert content["prompt"]["shared_ms"] == {1: [8.0, 16.0], 4: [5.0, 10.0]}
    assert content["prompt"]["rest_ms"] == [7.0, 14.0]
    assert content["decode"] == {"full_ms": [0.2, 0.2], "shared_ms": [0.1, 0.1]}
    assert table.whole is not None and (table.whole.expert_ms, table.whole.dense_ms) == ([2.0, 4.0], [1.0, 2.0])
    assert (table.whole.layers, table.whole.dense_layers, table.whole.tp, table.heads) == (78, 3, 8, 8)
    assert table.whole.collectives == Collectives(
        ranks=8, bytes_per_token=49152, gb_s=400.0, measured_ranks=2, step_ms=0.02
    )
    assert "6 layers with 256 experts of width 256 a rank (bfloat16 weights) measured on one GPU" in str(table)
    assert [(check["expected_ms"], check["measured_ms"]) for check in content["checks"]] == [
        (59.0, 59.0),
        (118.0, 118.0),
    ]
    assert "by hand. Engine: " in table.notes
    whole = table.at(100).prompt_ms(Pattern.full(78))
    assert whole == pytest.approx(7 + 75 * 10 + 3 * 9 + 78 * 7 / 8 * 100 * 49152 / 400e6)


def test_engines_of_two_versions_make_no_table(tmp_path: Path) -> None:
    found = measured(shape_of(tmp_path))
    found.found["plan"]["versions"] = {"sglang": "0.5.17"}
    with pytest.raises(SystemExit, match="expected one SGLang"):
        content_of(found, "mine", REDUCED, "")


def test_two_gpus_contain_what_they_send(tmp_path: Path) -> None:
    two = shape_of(tmp_path, gpus=2, tp_size=2, attn_cp_size=2)
    content = content_of(measured(two), "mine", None, "")
    assert (content["heads"], content["whole"]["cp"], content["whole"]["collectives"]) == (16, 2, "measured")
    assert "experts of width 256 a rank (bfloat16 weights) measured on 2 GPUs" in content["whole"]["label"]
    with pytest.raises(SystemExit, match="contain their all-reduces"):
        collectives(two, REDUCED)
    assert collectives(shape_of(tmp_path), None) == "unknown"
    with pytest.raises(SystemExit, match="is of 64, expected 6144"):
        collectives(shape_of(tmp_path), REDUCED | {"hidden": 64})


@pytest.mark.parametrize("lengths", [[150], [200, 100], [100, 100]])
def test_lengths_are_whole_chunks(lengths: list[int], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected rising multiples of 100"):
        shape_of(tmp_path).check(lengths)


def test_a_folder_that_is_no_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"has no rank_of\.json, expected a folder of"):
        Shape.read(tmp_path, ENGINE, QUERIES)


def test_a_rank_has_its_share_of_glm_5() -> None:
    """Sixteen layers of a rank have 256 experts of 3 x 6144 x 256 weights: 2.4 GB a layer in two bytes."""
    one, two = (rank_config(ranks=8, gpus=gpus, heads=None, layers=16, dtype="bf16") for gpus in (1, 2))
    assert (one["num_attention_heads"], one["moe_intermediate_size"], one["intermediate_size"]) == (8, 256, 1536)
    assert (two["num_attention_heads"], two["moe_intermediate_size"], two["intermediate_size"]) == (16, 512, 3072)
    weights = one["n_routed_experts"] * 3 * one["hidden_size"] * one["moe_intermediate_size"]
    assert 2 * weights == pytest.approx(2.4e9, rel=0.01)
    assert one["mlp_layer_types"].count("dense") == one["first_k_dense_replace"] == 2
    assert rank_of(one, 8, 1)["shape"]["moe_intermediate_size"] == 2048
    assert rank_config(ranks=8, gpus=1, heads=64, layers=16, dtype="fp8")["num_attention_heads"] == 64


def test_what_is_no_rank_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was a rank's is written over by a model with fewer experts, or none."""
    for words in ([], ["--experts", "64"], ["--experts", "0", "--nextn", "1"]):
        monkeypatch.setattr("sys.argv", ["rank_model", str(tmp_path), "--layers", "12", *words])
        rank_model.main()
        config = json.loads((tmp_path / "config.json").read_text())
        assert (tmp_path / "rank_of.json").exists() == (not words)
        if words:
            with pytest.raises(SystemExit, match=r"has no rank_of\.json"):
                Shape.read(tmp_path, ENGINE, QUERIES)
    assert config["first_k_dense_replace"] == 12 == config["mlp_layer_types"].count("dense")
    assert (config["intermediate_size"], config["num_nextn_predict_layers"]) == (9 * 256, 1)  # eight, and a shared one


def test_ranks_of_the_papers_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--shape", "glm-4.7-flash", "--ranks", "1", "--heads", "16", "--experts", "8", "--layers", "47"]
    monkeypatch.setattr("sys.argv", ["rank_model", str(tmp_path), *words])
    rank_model.main()
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = ("hidden_size", "q_lora_rank", "num_attention_heads", "n_routed_experts", "moe_intermediate_size")
    assert [config[name] for name in sizes] == [2048, 768, 16, 8, 1536]
    assert config["first_k_dense_replace"] == 1 and config["intermediate_size"] == 10240


# -- all-reduces, and tables that are computed


def test_the_formula_gives_back_the_time_that_its_bandwidth_is_of() -> None:
    size, tokens = 8192 * 6144 * 2, 8192
    found = bus_gb_s(size, 2, 0.3)
    sent = Collectives(ranks=2, bytes_per_token=2 * 6144 * 2, gb_s=found, measured_ranks=2, step_ms=1)
    assert sent.prompt_ms(tokens) == pytest.approx(0.3)
    assert sent.model_copy(update={"ranks": 8}).prompt_ms(tokens) == pytest.approx(0.3 * (7 / 8) / (1 / 2))


def test_context_parallelism_divides_attention_and_no_experts() -> None:
    content = whole_table()
    content["whole"]["shape"]["hidden_size"] = 6144
    content["checks"][0]["context"] = 1000
    table = LatencyTable.model_validate(divided(LatencyTable.model_validate(content), "cp8", REDUCED))
    assert table.prompt.full_ms == {1: [(10 - 2) / 8 + 2, (40 - 8) / 8 + 8]}
    assert table.prompt.shared_ms == {1: [(8 - 2) / 8 + 2, (32 - 8) / 8 + 8]}
    assert table.whole is not None and table.whole.cp == 8 and not table.checks and not table.at(1000).has_blocks
    assert table.whole.sent is not None and table.whole.sent.bytes_per_token == 2 * 6144 * 2 + 576 * 2 + 2 * 128
    assert "on TP 8, CP 8, computed from made: six layers measured; attention and indexers divided by 8" in str(table)
    with pytest.raises(SystemExit, match="expected a table of one rank of several"):
        divided(table, "again", REDUCED)
    with pytest.raises(SystemExit, match="expected a table of one rank of several"):
        divided(LatencyTable.load("glm-5-tp8"), "layers", REDUCED)
