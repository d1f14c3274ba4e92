"""`--json-model-override-args` that make another model of the one that a pattern file was made for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import IndexCacheError, Pattern, PatternFile
from sglang_indexcache.check import main
from sglang_indexcache.families import describe
from sglang_indexcache.families.dsa.override import to_sglang
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.preflight import Preflight
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.override_flag import FLAG, merged
from sglang_indexcache.sglang.probes import Feature, SglangSource
from tests.conftest import tiny_config, tiny_dense_config, tiny_v4_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {"glm": tiny_config(), "v4": tiny_v4_config(), "llama": tiny_dense_config()}


KINDS = ("problem", "warning")
OTHERS = [
    ("glm", {"index_topk": 4}, "index_topk is 8 in the file, 4 in .* with --json-model-override-args"),
    ("glm", {"index_n_heads": 1}, "index_n_heads is "),
    ("glm", {"rope_scaling": YARN}, "rope_parameters.factor is the default in the file, 4 in "),
    ("glm", {"rope_parameters": {"rope_theta": 7}}, "rope_parameters.rope_theta is .* in the file, 7 in "),
    ("glm", {"num_attention_heads": 2}, "num_attention_heads is "),
    ("v4", {"sliding_window": 4}, "sliding_window is .* in the file, 4 in "),
    ("llama", {"rope_scaling": YARN}, "rope_parameters.factor is the default in the file, 4 in "),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is the default in the file, gelu in "),
]


class AnySglang(SglangSource):
    """An SGLang that has all that is needed."""

    def require(self, *features: Feature) -> None:
        pass

    def unread(self, feature: Feature) -> str | None:
        return None


def made(name: str, folder: Path) -> PatternFile:
    """Write the config.json of a model, and make a pattern file for it."""
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    native = describe(config, "x").native
    roles = "FSSFSS" if name == "glm" else native.full_role + "S" * (len(native) - 1)
    return pattern_file(Pattern(roles, native.selection), config)


def served(name: str, overrides: dict[str, Any], folder: Path, allow: bool = False, letters: bool = False) -> None:
    """Check a server of a pattern file that was made for the model without overrides."""
    file = made(name, folder)
    spec = PatternSpec("x", letters=file.as_pattern()) if letters else PatternSpec("x", file)
    check = Preflight(spec, Asked(allow_mismatch=allow), AnySglang(Path(), "0.0"))
    check.check(SimpleNamespace(model_path=str(folder), json_model_override_args=json.dumps(overrides)))


@pytest.mark.parametrize(("name", "overrides", "found"), OTHERS)
def test_an_override_that_makes_another_model_is_refused_by_name(
    name: str, overrides: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(IndexCacheError, match=f"model.config: .*{found}"):
        served(name, overrides, tmp_path)
    served(name, overrides, tmp_path, allow=True)
    served(name, overrides, tmp_path, letters=True)  # no file says what they were found for


def lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Problems and warnings of indexcache-check."""
    code = main(arguments)
    text = capsys.readouterr().out.splitlines()
    problems, warnings = ([line.partition(": ")[2] for line in text if line.startswith(f"{kind}: ")] for kind in KINDS)
    assert code == bool(problems)
    return problems, warnings


@pytest.mark.parametrize(("name", "overrides", "found"), OTHERS)
def test_the_check_says_what_the_server_would(
    name: str, overrides: dict[str, Any], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 0 as its exit code, a deployment's check passed and the server ended."""
    model, given = str(tmp_path), json.dumps(overrides)
    made(name, tmp_path).save(tmp_path / "p.yaml")
    with pytest.raises(IndexCacheError) as error:
        served(name, overrides, tmp_path)
    pattern, launch = str(tmp_path / "p.yaml"), f"--tp 1 {FLAG} '{given}'"
    for arguments in (
        ["--model", model, FLAG, given],
        ["--model", model, "--server-args", launch],
        ["--model", model, FLAG, given, "--server-args", launch],
        ["--server-args", f"--model-path {model} {launch}"],
    ):
        assert lines([pattern, *arguments], capsys)[0] == [str(error.value)], arguments
    [line] = lines([pattern, "--server-args", f"--model-path org/name {launch}"], capsys)[0]
    assert re.search(found, line)  # by what the file says of its model
    allowed = f"--indexcache-allow-config-mismatch {launch}"
    for arguments in (
        ["--model", model, FLAG, given, "--allow-config-mismatch"],
        ["--model", model, "--server-args", allowed],
        ["--server-args", f"--model-path {model} {allowed}"],
        ["--server-args", f"SGLANG_INDEXCACHE_ALLOW_CONFIG_MISMATCH=1 sglang serve {launch}"],
    ):
        assert lines([pattern, *arguments], capsys)[0] == [], arguments


def test_an_override_may_make_the_model_that_the_file_was_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern that was searched with another index_topk; without the override it is of another model."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    pattern_file(Pattern("FSSFSS"), tiny_config(index_topk=16)).save(tmp_path / "p.yaml")
    pattern, model = str(tmp_path / "p.yaml"), str(tmp_path)
    given = json.dumps({"index_topk": 16})
    assert lines([pattern, "--model", model, FLAG, given], capsys)[0] == []
    assert lines([pattern, "--server-args", f"--model-path {model} {FLAG} '{given}'"], capsys)[0] == []
    for other in ([], [FLAG, '{"index_topk": 32}']):
        [problem] = lines([pattern, "--model", model, *other], capsys)[0]
        assert f"index_topk is 16 in the file, {32 if other else 8} in" in problem


def test_the_heads_of_the_overridden_model_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check looked at those of config.json."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(num_attention_heads=64)))
    arguments = ["FSSFSS", "--model", str(folder), "--server-args"]
    assert lines([*arguments, "--tp 8"], capsys)[0] == []
    [problem] = lines([*arguments, f"--tp 8 {FLAG} '{json.dumps({'num_attention_heads': 20})}'"], capsys)[0]
    assert problem.startswith("20 heads can't be shared out among 8 ranks of attention")


def test_two_overrides_that_differ_are_no_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("glm", tmp_path).save(tmp_path / "p.yaml")
    arguments = [str(tmp_path / "p.yaml"), "--model", str(tmp_path), FLAG, '{"hidden_size": 1}']
    assert main([*arguments, "--server-args", f"{FLAG} '{{}}'"]) == 2
    assert "is not that of --server-args; expected one of the two" in capsys.readouterr().err


def test_a_file_that_does_not_say_its_config_can_not_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = made("glm", tmp_path)
    file = file.model_copy(update={"model": file.model.model_copy(update={"config": None})})
    file.save(tmp_path / "p.yaml")
    arguments = [str(tmp_path / "p.yaml"), "--server-args"]
    problems, warnings = lines([*arguments, f"{FLAG} '{{\"index_topk\": 4}}'"], capsys)
    assert problems == [] and any(
        "whether it makes another model than that of the file is not known" in line for line in warnings
    )
    assert "not known" not in str(lines([*arguments, f'{FLAG} \'{{"index_topk_pattern": "FSSFSS"}}\''], capsys)[1])


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
