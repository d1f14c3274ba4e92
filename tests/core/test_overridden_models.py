"""`--json-model-override-args` that make another model of the one that a pattern file was made for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.check import main
from sglang_indexcache.families import describe
from sglang_indexcache.families.dsa.spellings import to_sglang
from sglang_indexcache.serving.preflight import Preflight
from sglang_indexcache.serving.request import PatternRequest
from sglang_indexcache.sglang.overrides import FLAG, merged
from sglang_indexcache.sglang.probes import Feature, SglangSource
from tests.conftest import tiny_config, tiny_dense_config, tiny_v4_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {"glm": tiny_config(), "v4": tiny_v4_config(), "llama": tiny_dense_config()}


class AnySglang(SglangSource):
    """An SGLang that has all that is needed."""

    def require(self, *features: Feature) -> None:
        pass

    def unread(self, feature: Feature) -> str | None:
        return None


def served(name: str, overrides: dict[str, Any], folder: Path, allow: bool = False, letters: bool = False) -> None:
    """Check a server of a pattern file that was made for the model without overrides."""
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    native = describe(config, "x").native
    roles = "FSSFSS" if name == "glm" else native.full_role + "S" * (len(native) - 1)
    file = pattern_file(Pattern(roles, native.selection), config)
    request = PatternRequest("x", file.as_pattern(), None if letters else file, allow)
    check = Preflight(request, AnySglang(Path(), "0.0"))
    check.check(SimpleNamespace(model_path=str(folder), json_model_override_args=json.dumps(overrides)))


@pytest.mark.parametrize(
    ("name", "overrides", "found"),
    [
        ("glm", {"index_topk": 4}, "index_topk is 8 in the file, 4 in .* with --json-model-override-args"),
        ("glm", {"index_n_heads": 1}, "index_n_heads is "),
        ("glm", {"rope_scaling": YARN}, "rope_parameters.factor is the default in the file, 4 in "),
        ("glm", {"rope_parameters": {"rope_theta": 7}}, "rope_parameters.rope_theta is .* in the file, 7 in "),
        ("glm", {"num_attention_heads": 2}, "num_attention_heads is "),
        ("v4", {"sliding_window": 4}, "sliding_window is .* in the file, 4 in "),
        ("llama", {"rope_scaling": YARN}, "rope_parameters.factor is the default in the file, 4 in "),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is the default in the file, gelu in "),
    ],
)
def test_an_override_that_makes_another_model_is_refused_by_name(
    name: str, overrides: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(IndexCacheError, match=f"model.config: .*{found}"):
        served(name, overrides, tmp_path)
    served(name, overrides, tmp_path, allow=True)
    served(name, overrides, tmp_path, letters=True)  # no file says what they were found for


@pytest.mark.parametrize("name", CONFIGS)
def test_overrides_that_make_no_other_model_are_none(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    same = {key: config[key] for key in ("num_attention_heads", "vocab_size", "hidden_size")}
    for overrides in ({}, same, {"quantization_config": {"bits": 8}}, {"indexcache": {"source": "x"}}):
        served(name, overrides, tmp_path)


def test_the_pattern_itself_may_be_spelt_out(tmp_path: Path) -> None:
    """As for servers without the plugin: it is the file's, and locks no layer."""
    served("glm", to_sglang(Pattern("FSSFSS")), tmp_path)
    served("glm", {"use_index_cache": True, "index_topk_pattern": "FSSFSS"}, tmp_path)
    with pytest.raises(IndexCacheError, match="index_topk_pattern means FFFFFF"):
        served("glm", {"index_topk_pattern": "FFFFFF"}, tmp_path)


@pytest.mark.parametrize("part", ["text_config", "language_config", "llm_config", "thinker_config"])
def test_keys_inside_of_a_part_are_refused(part: str, tmp_path: Path) -> None:
    """SGLang would read the part instead of the model's own configuration, or end."""
    for inner in ({"index_topk": 4}, {"hidden_size": 1}):
        with pytest.raises(IndexCacheError, match=f"--json-model-override-args: {part} is "):
            served("glm", {part: inner}, tmp_path)


@pytest.mark.parametrize("topk", [4, 8])
@pytest.mark.parametrize("allow", [(), ("--allow-config-mismatch",)], ids=["", "allowed"])
@pytest.mark.parametrize("place", ["beside", "in a line", "in a line with the model"])
def test_the_check_refuses_what_the_server_refuses(
    place: str, allow: tuple[str, ...], topk: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `no problems` of a model with other keys than the file was made for."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))  # index_topk is 8
    pattern_file(Pattern("FSSFSS"), tiny_config()).save(tmp_path / "p.yaml")
    given, model = json.dumps({"index_topk": topk}), str(tmp_path)
    arguments = {
        "beside": [*allow, "--model", model, FLAG, given],
        "in a line": [*allow, "--model", model, "--server-args", f"{FLAG} '{given}'"],
        "in a line with the model": [
            "--server-args",
            f"--model-path {model} {FLAG} '{given}' {'--indexcache-allow-config-mismatch' * bool(allow)}",
        ],
    }[place]
    refused = topk != 8 and not allow
    assert main([model + "/p.yaml", *arguments]) == refused
    out = capsys.readouterr().out
    assert out.count("problem: ") == out.count("index_topk is 8 in the file, 4 in ") == refused


def test_overrides_are_merged_as_sglang_does() -> None:
    config = {"rope_parameters": {"rope_theta": 5, "rope_type": "default"}, "index_topk": 8}
    assert merged(config, {"rope_scaling": {"factor": 2}})["rope_scaling"] == {
        "rope_theta": 5,
        "rope_type": "default",
        "factor": 2,
    }
    assert merged(config, {"index_topk": 4, "index_topk_pattern": "FS"}) == {**config, "index_topk": 4}
    assert config["index_topk"] == 8
