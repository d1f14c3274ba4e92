"""indexcache-check: fits or not, said before a server starts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main
from sglang_indexcache.checkpoint import checkpoint
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.io.errors import FileError, ModelConfigError, SpellingError
from sglang_indexcache.io.messages import NO_INDEXER, NOT_COMBINED, OTHER_LENGTH
from sglang_indexcache.sglang.override_flag import parse_overrides
from sglang_indexcache.sglang.probes import SglangSource
from tests.conftest import tiny_config, tiny_v4_config

PATTERN = Pattern("FSSFSS")
HAS_SGLANG = importlib.util.find_spec("sglang") is not None


def weights(layers: list[int]) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in layers]
    return {name: torch.zeros(1) for name in [*names, "model.embed_tokens.weight"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with config.json and indexer weights for six layers and a NextN layer."""
    folder = tmp_path / "glm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    save_file(weights([0, 1, 2, 3, 4, 5, 6]), folder / "model.safetensors")
    return folder


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[..., str]:
    def writer(pattern: Pattern = PATTERN, config: dict[str, Any] | None = None) -> str:
        pattern_file(pattern, config or tiny_config()).save(tmp_path / "p.yaml")
        return str(tmp_path / "p.yaml")

    return writer


def test_a_pattern_that_fits(model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write_file(), "--model", str(model)]) == 0
    output = capsys.readouterr().out
    assert "2 of 6 layers F" in output and output.endswith("no problems\n")
    assert "     5      5  S              3" in output
    assert json.dumps(indexer_types(PATTERN)) in output
    if not HAS_SGLANG:
        assert "note: SGLang is not installed here" in output


def test_json_has_the_same(model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write_file(), "--model", str(model), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pattern"] == PATTERN.roles and report["fingerprint"] == PATTERN.fingerprint
    assert report["source_layers"] == [0, 0, 0, 3, 3, 3]
    assert report["override"]["index_topk_pattern"] == PATTERN.roles
    assert report["problems"] == []


@pytest.mark.parametrize("more", [[], ["--server-args", "--tp 2"]], ids=["model", "launch line"])
def test_the_model_is_read_once(
    more: list[str], model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a hub id asks the hub, and a folder that changes between two reads was checked half and half."""
    read: list[str] = []
    monkeypatch.setattr(
        checkpoint, "read_config", lambda name, own=checkpoint.read_config: read.append(name) or own(name)
    )
    assert main([PATTERN.roles, "--model", str(model), *more]) == 0
    assert read == [str(model)]


def test_letters_of_deepseek_v4_are_shown_with_their_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_v4_config()))
    code = main(["FSSF", "--model", str(tmp_path)])
    output = capsys.readouterr().out
    assert "override  none" in output
    assert (
        "letter  layer  role  choice of   locked\n     0      2  F              2\n     1      4  S              2\n"
        in output
    )
    assert "     3      7  F              7\n" in output
    assert code == 0 and ("SGLang is not installed" in output) != ("no rule that could be asked" in output)
    assert main(["FSS", "--model", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["layers"] == [2, 4, 6, 7]


def problems(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(arguments) == 1
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]


def test_layers_without_indexer_weights_cannot_be_full(
    model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """GLM-5.2 ships no indexer for its shared layers; engines would run random weights there without a word."""
    save_file(weights([0, 1, 2, 4, 5]), model / "model.safetensors")
    [line] = problems([write_file(), "--model", str(model)], capsys)
    assert line == f"problem: pattern has F for layer 3, but the checkpoint has {NO_INDEXER}; expected S"


def test_weights_are_found_in_an_index_and_in_shards(model: Path) -> None:
    assert Checkpoint.read(str(model)).indexer_layers == frozenset(range(6))
    save_file(weights([0, 1]), model / "model.safetensors")
    save_file(weights([2]), model / "other.safetensors")
    assert Checkpoint.read(str(model)).locked == (3, 4, 5)
    index = {"weight_map": dict.fromkeys(weights([0, 4]), "x.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint.read(str(model)).indexer_layers == frozenset({0, 4})


def test_without_weights_that_part_is_left_out_and_said(
    model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors").unlink()
    assert main([write_file(), "--model", str(model)]) == 0
    assert "note: no safetensors files at hand" in capsys.readouterr().out


def test_other_models_and_lengths_are_problems(
    model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = problems([write_file(Pattern("FSSFS")), "--model", str(model)], capsys)
    assert lines[0] == f"problem: {OTHER_LENGTH.format(5, 6)}"
    other = write_file(config=tiny_config(index_topk=16))
    [line] = problems([other, "--model", str(model)], capsys)
    assert line == (
        "problem: model.config: index_topk is 16 in the file, 8 in glm; expected a file made for this model"
    )
    assert main([other, "--model", str(model), "--allow-config-mismatch"]) == 0


def test_contradicting_overrides_are_problems(
    model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--json-model-override-args"
    lines = problems([write_file(), "--model", str(model), flag, '{"index_topk_pattern": "FFFFFF"}'], capsys)
    assert lines == [f"problem: {flag}: index_topk_pattern means FFFFFF, the pattern file FSSFSS; expected one of them"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 1.0},
        {"index_topk_freq": 1},
        {"index_topk_pattern": "FSSFSS"},
        {"indexer_types": indexer_types(PATTERN)},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    ],
)
def test_overrides_are_merged(given: dict[str, Any]) -> None:
    merged = DSA.sglang.to_overrides(given, PATTERN)
    assert merged["index_topk_pattern"] == "FSSFSS" and merged["indexer_types"] == indexer_types(PATTERN)
    assert merged["index_topk_freq"] == 1 and "index_skip_topk_offset" not in merged
    assert merged.get("rope_theta") == given.get("rope_theta")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"index_topk_freq": 3}', "index_topk_freq means FFSSFS"),
        ('{"indexer_types": ["full"]}', OTHER_LENGTH.format(1, 6)),
        (
            '{"index_topk_pattern": "FSSFSS", "indexer_types": ["full", "full", "full", "full", "full", "full"]}',
            "means FFFFFF",
        ),
        ('{"cli_factor": 2}', "cli_factor is 2, which wins over any pattern"),
        ("[1]", "is list, expected a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_bad_overrides_are_refused(given: str, message: str) -> None:
    with pytest.raises(SpellingError, match=message):
        DSA.sglang.to_overrides(parse_overrides(given), PATTERN)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["p.yaml", "--environment"],
        ["p.yaml", "--known"],
        ["--known", "--environment"],
        ["--known", "--model", "x"],
        ["--known", "--server", "http://x"],
        ["--environment", "--model", "x"],
        ["--environment", "--server", "http://x"],
        ["--environment", "--allow-config-mismatch"],
        ["p.yaml", "--server", "http://x", "--sglang", "folder"],
        ["p.yaml", "--server", "http://x", "--allow-config-mismatch"],
        ["p.yaml", "--server", "http://x", "--json-model-override-args", '{"rope_theta": 1}'],
        ["FSSS", "--server-args", "--"],
        ["FSSS", "--model=--"],
        ["FSSS", "--server=--"],
    ],
)
def test_what_to_check_must_be_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and ("expected" in error or " is used with " in error)


def test_a_pattern_is_checked_against_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["p.yaml"]) == 2
    line = "indexcache-check: expected --model, --server or --server-args to check the pattern against\n"
    assert capsys.readouterr().err == line


def test_an_unpacked_sglang_is_read(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "wheel" / "sglang"
    (root / "srt").mkdir(parents=True)
    (tmp_path / "wheel" / "sglang-9.9.9.dist-info").mkdir()
    assert main(["FSSFSS", "--model", str(model), "--sglang", str(tmp_path / "wheel"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["sglang"] == "9.9.9" and report["problems"]
    assert main(["FSSFSS", "--model", str(model), "--sglang", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_uniform_keeps_to_layers_that_have_an_indexer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(weights([0, 1, 2, 4, 5]), model / "model.safetensors")
    assert main(["uniform@1/2", "--model", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pattern"] == "FSFSFS"
    assert main(["uniform@1/3", "--model", str(model), "--json"]) == 0  # FSSFSS needs layer 3
    report = json.loads(capsys.readouterr().out)
    assert report["pattern"] == "FSFSSS" and "nearest to its places" in report["notes"][0]
    save_file(weights([0, 1]), model / "model.safetensors")
    assert main(["uniform@1/2", "--model", str(model)]) == 2
    assert "uniform 1/2 keeps 3 of 6 layers F, but the checkpoint has indexers for 2;" in capsys.readouterr().err


def test_unreadable_input_exits_with_2(
    model: Path, write_file: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["nothing.yaml", "--model", str(model)], "nothing.yaml: No such file"),
        ([write_file(), "--model", "nowhere"], "nowhere: no such folder, and not a hub id"),
        ([write_file(), "--model", str(tmp_path)], "config.json: No such file"),
        ([write_file(), "--model", "owner/nothing"], "owner/nothing: no such folder, and config.json can't be had"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("indexcache-check: ") and message in error and error.count("\n") == 1


def test_damaged_checkpoints_are_refused(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x05\x00")
    with pytest.raises(ModelConfigError, match="not a safetensors file"):
        Checkpoint.read(str(model))
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="weight_map is missing"):
        Checkpoint.read(str(model))
    (model / "config.json").write_text("[]")
    with pytest.raises(FileError, match="found list, expected a JSON object"):
        Checkpoint.read(str(model))


@pytest.mark.sglang
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
def test_the_installed_sglang_would_run_exactly_the_pattern(model: Path, model_type: str) -> None:
    (model / "config.json").write_text(json.dumps(tiny_config(model_type)))
    installed = SglangSource.installed()
    assert installed is not None
    for roles in ("FFFFFF", "FSSFSS", "FSFFSF"):
        override = DSA.sglang.to_overrides({}, Pattern(roles))
        assert DSA.sglang.would_run(installed, str(model), override, 6) == roles


@pytest.mark.sglang
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
def test_the_documented_override_alone_is_ignored_on_glm5(model: Path) -> None:
    """Why both spellings are sent: from 0.5.20 on, letters alone leave GLM-5 at all F, silently."""
    installed = SglangSource.installed()
    assert installed is not None
    effective = DSA.sglang.would_run(installed, str(model), {"index_topk_pattern": "FSSFSS"}, 6)
    newer = tuple(map(int, installed.version.split(".")[:3])) >= (0, 5, 20)
    assert effective == ("FFFFFF" if newer else "FSSFSS")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--indexcache-shard-indexers --attn-cp-size 2", "--attn-cp-size can't be combined with --indexcache-shard-in"),
        (
            "SGLANG_INDEXCACHE_SHARD_INDEXERS=1 sglang serve --dcp-size 2",
            "--dcp-size can't be combined with --indexcac",
        ),
        ("--indexcache-pattern FFSFSS --tp 8", "--server-args serves FFSFSS, which is another pattern than FSSFSS"),
        ("SGLANG_INDEXCACHE_PATTERN=FFSFSS sglang serve", "--server-args serves FFSFSS, which is another pattern than"),
        (
            "--indexcache-pattern /on/a.yaml",
            "could not be judged: the pattern that --server-args serve (/on/a.yaml",
        ),
        ("--indexcache-calibrate", "--server-args starts a calibration server, which serves no pattern"),
        ("SGLANG_USE_SM90_LITETOPK=1 sglang serve --tp 8", f"SGLANG_USE_SM90_LITETOPK {NOT_COMBINED}"),
        ("--enable-two-batch", f"--enable-two-batch-overlap {NOT_COMBINED}: its path"),
        ("--lala", "could not be judged: --lala (no such flag)"),
        ("--tp eight", "could not be judged: --tp (argument --tp-size/--tensor-parallel-size: invalid int value"),
        ("--kv-cache-dtype FP8_E4M3", "could not be judged: --kv-cache-dtype (argument --kv-cache-dtype: invalid choi"),
    ],
)
def test_a_launch_line_that_would_not_serve_it_is_a_problem(
    line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 for a line that the server refuses would let it through a deployment's checks."""
    found = problems(["FSSFSS", "--server-args", line], capsys)
    assert len(found) == 1 and found[0].startswith(f"problem: {problem}")


@pytest.mark.parametrize(("line", "code"), [("--tp 2", 0), ("--enable-two-batch-overlap", 1)])
def test_no_problems_is_said_once_all_was_checked(
    line: str, code: int, model: Path, write_file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It stood above the problems of a launch line."""
    assert main([write_file(), "--model", str(model), "--server-args", line]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("no problems") == 1 - code and lines[-1].startswith("problem: " if code else "no problems")


def test_a_launch_line_that_serves_it_has_our_flags_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = "python -m sglang_indexcache.launch_server --indexcache-pattern FSSFSS --tp 8 --log-level error"
    assert main(["FSSFSS", "--json", "--server-args", line]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["combinations"][0]["name"] == "tensor parallelism" and not report["problems"]
    assert "--log-level error hides the lines" in report["launch_notes"][0]
    for broken in ("--tp '8", "--indexcache-lala"):
        assert main(["FSSFSS", "--server-args", broken]) == 2
        assert capsys.readouterr().err.count("\n") == 1
