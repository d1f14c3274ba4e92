"""Whoever pastes a flag into an engine is told which layers it runs: alone, beside a pattern, in a launch line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main
from sglang_indexcache.io.messages import NO_INDEXER, OTHER_LENGTH
from sglang_indexcache.sglang.override_flag import FLAG
from tests.conftest import tiny_config, tiny_v4_config

ROLES = "FSSFSS"
LETTERS = {"index_topk_pattern": ROLES}
IGNORED = (
    "SGLang 0.5.20 to 0.5.23 ignores index_topk_pattern on GlmMoeDsaForCausalLM (it reads indexer_types first, which"
    " its configuration class fills in): all 6 layers stay F"
)
TYPES = ["full", "shared", "shared", "full", "shared", "shared"]


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with and without SGLang; extras/launch/tests/live/test_override_rules.py asks a real one."""
    monkeypatch.setattr("sglang_indexcache.sglang.probes.SglangSource.installed", lambda: None)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    def writer(config: dict[str, Any] | None = None) -> str:
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "config.json").write_text(json.dumps(config or tiny_config()))
        return str(tmp_path / "m")

    return writer


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[[str], str]:
    """A folder that calls itself an SGLang of a version."""

    def writer(version: str) -> str:
        (tmp_path / version / "sglang" / "srt").mkdir(parents=True)
        (tmp_path / version / f"sglang-{version}.dist-info").mkdir()
        return str(tmp_path / version)

    return writer


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def those(lines: list[str], kind: str) -> list[str]:
    return [line.removeprefix(f"{kind}: ") for line in lines if line.startswith(f"{kind}: ")]


def alone(capsys: pytest.CaptureFixture[str], model: str, override: Any, *more: str) -> tuple[int, list[str]]:
    return run(capsys, "--model", model, FLAG, json.dumps(override), *more)


def test_the_documented_override_is_a_problem_by_itself(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said to run as written, with `no problems`, while four versions run every indexer."""
    code, lines = alone(capsys, model(), LETTERS)
    assert (code, those(lines, "problem")) == (1, [IGNORED])
    assert "SGLang 0.5.11 to 0.5.19 runs 2 of 6 layers F by index_topk_pattern" in lines and IGNORED in lines
    assert "vLLM 0.33.0 runs 2 of 6 layers F by index_topk_pattern" in lines
    assert f"means     {ROLES}" in lines


def test_the_named_sglang_is_the_one_that_counts(
    model: Callable[..., str], wheel: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = alone(capsys, model(), LETTERS, "--sglang", wheel("0.5.17"))
    assert (code, lines[-1]) == (0, "no problems")
    code, lines = alone(capsys, model(), LETTERS, "--sglang", wheel("0.5.23"))
    assert (code, those(lines, "problem")) == (1, [IGNORED.replace("0.5.20 to 0.5.23", "0.5.23")])


@pytest.mark.parametrize("version", ["0.5.24", "0.5.10", "0.5.20.post1", "0.6.0rc1"])
def test_a_version_that_was_not_read_is_not_answered_for(
    version: str, model: Callable[..., str], wheel: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = alone(capsys, model(), LETTERS, "--sglang", wheel(version))
    line = f"which layers SGLang {version} would run is not known: not read yet; newest read is 0.5.23"
    assert (code, those(lines, "problem")) == (1, [line])
    _, lines = run(capsys, ROLES, "--model", model(), FLAG, json.dumps(LETTERS), "--sglang", wheel(version + "+cpu"))
    assert any("newest read is 0.5.23" in warning for warning in those(lines, "warning"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"indexer_types": TYPES}, "SGLang 0.5.11 to 0.5.19 ignores indexer_types"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "SGLang 0.5.20 to 0.5.23 ignores index_topk_freq and"),
        ({"index_topk_pattern": list(ROLES)}, IGNORED),
        ({"index_topk_pattern": ROLES.lower()}, "'f' for layer 0, expected F or S in capitals"),
        ({"index_topk_pattern": "FSS"}, f"index_topk_pattern: {OTHER_LENGTH.format(3, 6)}"),
        ({"index_topk_pattern": "F,S,S,F,S,S"}, "index_topk_pattern: pattern has ',' for layer 1"),
        ({"index_topk_pattern": "FSS\nFSS"}, "expected F or S"),
        (
            {"index_topk_pattern": ROLES, "indexer_types": ["full"] * 6},
            "indexer_types means FFFFFF, index_topk_pattern",
        ),
        ({"index_skip_topk_offset": 3}, "says nothing without index_topk_freq"),
        ({"text_config": LETTERS}, "index_topk_pattern stands in text_config"),
        ({"index_topk_pattern": None}, "index_topk_pattern of null means no pattern"),
        ({"cli_factor": 2}, "cli_factor is 2"),
        ({**LETTERS, "num_hidden_layers": 4}, "num_hidden_layers is 4, m has 6"),
        ({**LETTERS, "architectures": ["X"]}, "architectures changes which model this is"),
    ],
)
def test_what_does_not_run_as_meant_is_a_problem(
    override: dict[str, Any], message: str, model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = alone(capsys, model(), override)
    assert code == 1 and any(message in line for line in those(lines, "problem")), lines


@pytest.mark.parametrize(
    "override",
    [
        {**LETTERS, "indexer_types": TYPES},
        {**LETTERS, "indexer_types": None},
        {**LETTERS, "indexer_types": TYPES, "index_topk_freq": 1, "rope_theta": 1},
    ],
)
def test_what_runs_as_meant_everywhere_is_right(
    override: dict[str, Any], model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = alone(capsys, model(), override)
    assert (code, lines[-1]) == (0, "no problems")


def test_an_override_without_roles_is_no_question(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for override, message in (
        ({"rope_theta": 1}, "says nothing of roles; expected one of"),
        ([1], "is list, expected"),
    ):
        code, lines = alone(capsys, model(), override)
        assert code == 2 and len(lines) == 1 and f"{FLAG} {message}" in lines[0]
    code, lines = run(capsys, "--model", model(), FLAG, '{"index_topk_pattern": FSS}')
    assert code == 2 and "is not JSON" in lines[0]


def test_layers_without_an_indexer_stay_locked(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """A pasted pattern of GLM-5 on GLM-5.2: engines that take it run indexers without weights."""
    folder = model(tiny_config(indexer_types=["full"] * 3 + ["shared"] * 3))
    code, lines = alone(capsys, folder, {"index_topk_pattern": "FSFFFS"})
    assert code == 1 and f"pattern has F for layer 3, 4, but the checkpoint has {NO_INDEXER}; expected S" in lines[-2]
    assert "(it reads indexer_types first, which config.json has): 3 of 6 layers stay F" in lines[-1]


def test_a_freq_takes_the_offset_of_config_json(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config("deepseek_v32", index_topk_freq=4, index_skip_topk_offset=3)
    code, lines = alone(capsys, model(config), {"index_topk_freq": 8})
    assert "means     FFFSSS" in lines
    assert code == 1 and those(lines, "problem") == [
        "SGLang 0.5.11 to 0.5.12.post1 runs 2 of 6 layers F by index_topk_freq: FFSSSS instead of FFFSSS"
    ]


def test_models_whose_configuration_has_no_roles(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = alone(capsys, model(tiny_v4_config()), {"index_topk_pattern": "FSSF"})
    line = "ignores index_topk_pattern on DeepseekV4ForCausalLM (it reads no such key there): all 4 layers stay F"
    assert code == 1 and any(line in item for item in those(lines, "problem"))


def test_as_json(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert alone(capsys, model(), LETTERS, "--json")[0] == 1
    main(["--model", model(), FLAG, json.dumps(LETTERS), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["means"], report["problems"]) == (ROLES, [IGNORED])
    assert [(item["versions"][-1], item["roles"], item["ignored"]) for item in report["readings"]] == [
        ("0.5.19", ROLES, []),
        ("0.5.23", "F" * 6, ["index_topk_pattern"]),
        ("0.33.0", ROLES, []),
    ]


def test_beside_a_pattern_it_is_a_warning(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher adds the other spelling; who pastes the flag elsewhere has nothing of that."""
    code, lines = run(capsys, ROLES, "--model", model(), FLAG, json.dumps(LETTERS))
    assert (code, those(lines, "warning")) == (0, [f"without the launcher, {IGNORED}"])
    main([ROLES, "--model", model(), FLAG, json.dumps(LETTERS), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [item["roles"] for item in report["alone"]] == [ROLES, "F" * 6, ROLES]
    both = json.dumps({**LETTERS, "indexer_types": TYPES})
    code, lines = run(capsys, ROLES, "--model", model(), FLAG, both)
    assert (code, those(lines, "warning"), lines[-1]) == (0, [], "no problems")
    code, lines = run(capsys, "FFSSSS", "--model", model(), FLAG, json.dumps(LETTERS))
    assert code == 1 and "index_topk_pattern means FSSFSS, the pattern file FFSSSS" in lines[-1]


def in_line(override: Any, more: str = "") -> str:
    return f"--tp 2 {more} {FLAG} '{json.dumps(override)}'"


def test_in_a_launch_line(model: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    warned = [f"without the launcher, {IGNORED}"]
    for arguments in (
        ["--server-args", in_line(LETTERS), "--model", model()],
        ["--server-args", in_line(LETTERS, f"--model-path {model()}")],
        ["--server-args", in_line(LETTERS)],
    ):
        code, lines = run(capsys, ROLES, *arguments)
        assert (code, those(lines, "warning")) == (0, warned)
    main([ROLES, "--server-args", in_line(LETTERS), "--json"])
    assert json.loads(capsys.readouterr().out)["warnings"] == warned
    assert those(run(capsys, ROLES, "--server-args", in_line({"rope_theta": 1}))[1], "warning") == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"index_topk_pattern": "FFSSSS"}, "index_topk_pattern means FFSSSS, the pattern file FSSFSS; expected one of"),
        ({"index_topk_freq": 3}, "index_topk_freq means FFSSFS, the pattern file FSSFSS"),
        ({"indexer_types": ["full"] * 6}, "indexer_types means FFFFFF, the pattern file FSSFSS"),
        ({"index_topk_pattern": "FSS"}, OTHER_LENGTH.format(3, 6)),
        ({"text_config": LETTERS}, "may change attention"),
        ([ROLES], f"{FLAG} is list, expected a JSON object"),
    ],
)
def test_another_pattern_in_a_launch_line_is_a_problem(
    override: Any, message: str, model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--model", model()]):
        code, lines = run(capsys, ROLES, "--server-args", in_line(override), *more)
        assert code == 1 and any(message in line for line in those(lines, "problem")), lines


def test_an_override_of_a_launch_line_that_lost_its_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, ROLES, "--server-args", FLAG + " " + json.dumps(LETTERS).replace(" ", ""))
    assert code == 1 and f"{FLAG} is not JSON: {{index_topk_pattern:FSSFSS}}" in lines[-1]
    code, lines = run(capsys, ROLES, "--server-args", f"--tp 8 {FLAG}")
    assert code == 1 and lines[-1].startswith(f"problem: could not be judged: {FLAG} (argument")


def test_a_file_says_for_which_model_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --model, letters may be of DeepSeek-V3.2, where the flag works; a file is of one of them."""
    for model_type, warned in (("deepseek_v32", []), ("glm_moe_dsa", [f"without the launcher, {IGNORED}"])):
        pattern_file(Pattern(ROLES), tiny_config(model_type)).save(tmp_path / "p.yaml")
        code, lines = run(capsys, str(tmp_path / "p.yaml"), "--server-args", in_line(LETTERS))
        assert (code, those(lines, "warning")) == (0, warned)


def test_keys_of_config_json_that_contradict_each_other(
    model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """GLM-5.2 with another offset than its types: versions that read the one or the other run different layers."""
    types = ["full"] * 3 + ["shared"] * 3
    folder = model(tiny_config(indexer_types=types, index_topk_freq=4, index_skip_topk_offset=2))
    code, lines = run(capsys, "FSSSSS", "--model", folder)
    assert code == 0 and those(lines, "warning") == [
        "config.json: index_topk_freq means FFSSSF, indexer_types FFFSSS; without the launcher, versions of SGLang take"
        " one or the other"
    ]
    folder = model(tiny_config(indexer_types=types, index_topk_freq=4, index_skip_topk_offset=3))
    assert those(run(capsys, "FSSSSS", "--model", folder)[1], "warning") == []
