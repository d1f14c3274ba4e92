"""Conditions of comparisons: what they are read as, what SGLang is started with, and what is said of one that ends."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import pytest

from scripts.bench.serving import cut_down_v4
from scripts.bench.serving.conditions import Condition, checked, flags, last_error, ports
from sglang_indexcache.io.refusal import GROUPING_VARIABLE, PATTERN_VARIABLE, SHARD_VARIABLE

GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 6}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**GLM, "index_topk": 16, "index_n_heads": 32}))
    return tmp_path


@pytest.mark.parametrize("text", ["plain", "stock=", "stock=plain", "stock=plain ++ {}"])
def test_no_letters_are_sglang_alone(text: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATTERN_VARIABLE, "left over")
    condition = Condition.parse(text)
    assert condition.pattern is None and condition.proven is None
    assert PATTERN_VARIABLE not in condition.environment(model, model)


def test_letters_and_arguments_of_its_own() -> None:
    condition = Condition.parse('cp14-alone=FS*2F*3+0q4 ++ {"tp_size": 2, "a": "x=y", "dsa_prefill_backend": null}')
    assert condition.proven == "FSSFFF+0q4" and condition.name == "cp14-alone"
    found = condition.engine({"dsa_prefill_backend": "flashmla_sparse", "page_size": 64, "tp_size": 1}, Path())
    assert found == {"page_size": 64, "tp_size": 2, "a": "x=y"}


def test_the_environment_of_a_pattern(model: Path) -> None:
    found = Condition.parse('a-sharded=FSSFSS ++ {"env": {"SGLANG_X": 1}}').environment(model, model)
    assert Path(found[PATTERN_VARIABLE]).name == "a-sharded.yaml" and "FSSFSS" in (model / "a-sharded.yaml").read_text()
    assert (found[GROUPING_VARIABLE], found[SHARD_VARIABLE], found["SGLANG_X"]) == ("0", "1", "1")
    assert "env" not in Condition.parse('a=F ++ {"env": {"SGLANG_X": 1}}').engine({}, model)


def test_a_switch_has_all_spellings_and_no_plugin(model: Path) -> None:
    condition = Condition.parse('uniform-switch=FSSFSS ++ {"json_model_override_args": {"index_topk": 32}}')
    overrides = json.loads(condition.engine({}, model)["json_model_override_args"])
    types = ["full", "shared", "shared"] * 2
    expected = {"index_topk_pattern": "FSSFSS", "indexer_types": types, "index_topk_freq": 1}
    assert overrides == {"index_topk": 32, **expected}
    assert condition.proven is None and PATTERN_VARIABLE not in condition.environment(model, model)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("quarter", "expected NAME=LETTERS"),
        ("a/b=FS", "expected NAME=LETTERS"),
        ("a=FX", "a: "),
        ("a=FS ++ {", "a: "),
        ("a=FS ++ [1]", "expected a JSON object"),
        ("a-switch=FS+0q4", "switch takes F and S, found 'FS+0q4'"),
        ("a-switch=plain", "switch takes F and S, found 'plain'"),
    ],
)
def test_wrong_ones_get_one_line(text: str, line: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        Condition.parse(text)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "line"), [(("a=FSSFSS", "a=FFFFFF"), "a: two conditions"), (("a=FS",), "a: pattern has 2 letters")]
)
def test_what_would_fail_in_an_engine_fails_before(texts: tuple[str, ...], line: str, model: Path) -> None:
    with pytest.raises(ValueError, match=line):
        checked(list(map(Condition.parse, texts)), model, {})


def test_a_pattern_has_the_letters_of_its_family(tmp_path: Path) -> None:
    """Of eight layers of a cut-down DeepSeek-V4 four have a letter."""
    (tmp_path / "config.json").write_text(json.dumps(cut_down_v4.config(32)))
    checked([Condition.parse("a=FSSS")], tmp_path, {})
    with pytest.raises(ValueError, match="a: pattern has 8 letters"):
        checked([Condition.parse("a=FSSSFSSS")], tmp_path, {})


def test_sglang_alone_runs_a_model_of_which_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    checked([Condition.parse("plain")], tmp_path, {})
    with pytest.raises(ValueError, match="a: "):
        checked([Condition.parse("a=FS")], tmp_path, {})


def test_engines_side_by_side_have_ports_of_their_own() -> None:
    """SGLang derives 233 to 240 behind the first port for data-parallel attention, and draws from 22000 on."""
    run, another = ports(), ports()
    found = [*islice(run, 6), *islice(another, 6)]
    used = [number for place in found for number in (*place.values(), *range(place["port"] + 233, place["port"] + 241))]
    assert len(set(used)) == len(used) and max(used) < 22000


def test_an_engines_arguments_are_those_of_a_server() -> None:
    engine = {"page_size": 64, "disable_radix_cache": True, "trust_remote_code": False, "cuda_graph_bs_decode": [1, 2]}
    expected = ["--page-size", "64", "--disable-radix-cache", "--cuda-graph-bs-decode", "1", "2"]
    assert list(flags({**engine, "json_model_override_args": {}})) == [*expected, "--json-model-override-args", "{}"]


def test_the_line_that_says_why() -> None:
    log = "INFO fine\nValueError: 20 heads are refused\n[x] Received sigquit from a child\nRuntimeError: Rank 0 died\n"
    assert last_error(log) == "ValueError: 20 heads are refused"
    assert last_error("loading\nKilled\n") == "Killed" and last_error(" \n") == "no output"
