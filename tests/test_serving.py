"""The SGLang plugin: inert without a pattern, exact with one, and no server where it can't be proven.

What needs a running SGLang is marked `sglang`; the rest runs on stand-ins.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang_indexcache import DsaModel, Pattern, PatternFile, plugin, serving
from sglang_indexcache.errors import PatternError, PatternFileError, SpellingError
from sglang_indexcache.launch_server import split_arguments
from sglang_indexcache.pattern_file import ModelSection
from sglang_indexcache.serving import Serving, effective_roles, mismatch
from tests.conftest import tiny_config

PATTERN = Pattern("FSSFSS")
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")


def pattern_file(pattern: Pattern = PATTERN, **changes: Any) -> PatternFile:
    model = DsaModel.from_config(tiny_config(**changes), "glm")
    section = ModelSection(
        architecture=model.architecture, num_layers=len(pattern), config_sha256=model.config_sha256, name="glm"
    )
    return PatternFile(schema="indexcache/v1", model=section, pattern=pattern.roles, retention=pattern.retention)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    names = [f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in range(6)]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    return tmp_path


def test_without_a_pattern_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.setattr(serving, "install", lambda *_, **__: pytest.fail("installed"))
        if value is None:
            monkeypatch.delenv(plugin.PATTERN_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(plugin.PATTERN_VARIABLE, value)
        plugin.register()


def test_an_unusable_pattern_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SystemExit, since SGLang's plugin loader logs every Exception and serves on."""
    monkeypatch.setenv(plugin.PATTERN_VARIABLE, "nothing.yaml@1/2")
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "indexcache: nothing.yaml: No such file or directory\n"


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    [entry] = [item for item in entry_points(group="sglang.srt.plugins") if item.name == "indexcache"]
    assert entry.load() is plugin.register


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "8"], (None, False, ["--tp", "8"])),
        (["--indexcache-pattern", "a@1/4", "--tp", "8"], ("a@1/4", False, ["--tp", "8"])),
        (["--tp=8", "--indexcache-pattern=a"], ("a", False, ["--tp=8"])),
        (["--indexcache-allow-config-mismatch", "--indexcache-pattern", "a"], ("a", True, [])),
    ],
)
def test_our_flags_are_split_off(arguments: list[str], expected: Any) -> None:
    assert split_arguments(arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--indexcache-pattern"],
        ["--indexcache-pattern", "--tp"],
        ["--indexcache-pattern="],
        ["--indexcache-pattern=a"] * 2,
    ],
)
def test_a_pattern_flag_without_value_or_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="--indexcache-pattern"):
        split_arguments(arguments)


def test_the_launcher_needs_sglang_and_a_pattern() -> None:
    command = [sys.executable, "-m", "sglang_indexcache.launch_server", "--model-path", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    expected = "--indexcache-pattern is missing" if HAS_SGLANG else "SGLang is not installed"
    assert result.stderr.startswith(f"indexcache: {expected}") and result.stderr.count("\n") == 1


def test_preflight_checks_length_weights_and_digest(model: Path) -> None:
    Serving(pattern_file(), False).check_model(str(model))
    with pytest.raises(PatternError, match="pattern has 5 letters, model has 6"):
        Serving(pattern_file(Pattern("FSSFS")), True).check_model(str(model))
    with pytest.raises(PatternFileError, match=r"model\.config_sha256"):
        Serving(pattern_file(index_topk=16), False).check_model(str(model))
    Serving(pattern_file(index_topk=16), True).check_model(str(model))
    save_file({"model.layers.0.self_attn.indexer.wk.weight": torch.zeros(1)}, model / "model.safetensors")
    with pytest.raises(PatternError, match="F for layer 3, but the checkpoint has no indexer"):
        Serving(pattern_file(), False).check_model(str(model))


def test_the_pattern_is_merged_into_the_users_overrides() -> None:
    merged = json.loads(Serving(pattern_file(), False).merged('{"rope_theta": 5}'))
    assert merged["rope_theta"] == 5 and merged["index_topk_pattern"] == "FSSFSS"
    with pytest.raises(SpellingError, match="means FFFFFF"):
        Serving(pattern_file(), False).merged('{"index_topk_pattern": "FFFFFF"}')


class Attention(nn.Module):
    """Carries what SGLang's DSA attention modules carry."""

    def __init__(self, layer_id: int, role: str, indexer: bool = True, is_nextn: bool = False) -> None:
        super().__init__()
        self.layer_id, self.skip_topk, self.next_skip_topk = layer_id, role == "S", False
        self.indexer, self.is_nextn = (nn.Identity() if indexer else None), is_nextn


def loaded(roles: str, first: int = 0, **options: Any) -> nn.Module:
    return nn.ModuleList([nn.Sequential(Attention(first + i, role, **options)) for i, role in enumerate(roles)])


def test_a_model_that_runs_the_pattern_is_proven_so() -> None:
    model = nn.ModuleList([loaded("FSSFSS"), Attention(6, "S", is_nextn=True), nn.Linear(2, 2)])
    found = effective_roles(model)
    assert "".join(found[layer].role for layer in range(6)) == "FSSFSS" and len(found) == 6
    assert mismatch(PATTERN, found) is None
    assert mismatch(PATTERN, effective_roles(loaded("FSS", first=3))) is None  # a pipeline stage


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (loaded("FSFFSS"), "layer 2 would run as F, the pattern says S"),
        (loaded("FSSSSS"), "layer 3 would run as S, the pattern says F"),
        (loaded("FSSFSSS"), "has a DSA layer 6, the pattern has 6 letters"),
        (loaded("FSSFSS", indexer=False), "layer 0 is F, but the loaded model has no indexer there"),
        (nn.Linear(2, 2), "no DSA attention module"),
    ],
)
def test_any_difference_is_one_line(model: nn.Module, message: str) -> None:
    line = mismatch(PATTERN, effective_roles(model))
    assert line is not None and message in line


def test_a_mismatch_ends_the_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    prove = serving._prove(Serving(pattern_file(), False))
    prove(None, SimpleNamespace(model=loaded("FSSFSS"), is_draft_worker=False))
    prove(None, SimpleNamespace(model=loaded("FFFFFF"), is_draft_worker=True))
    with pytest.raises(SystemExit) as caught:
        prove(None, SimpleNamespace(model=loaded("FFFFFF"), is_draft_worker=False))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "indexcache: layer 1 would run as F, the pattern says S\n"


def test_what_the_hook_passes_on() -> None:
    def init(self: Any, model_path: str, model_override_args: str = "{}", is_draft_model: bool = False) -> None: ...

    import inspect

    class Checked(Serving):
        def check_model(self, model_path: str) -> None:
            checked.append(model_path)

    checked: list[str] = []
    before = serving._merge_pattern(Checked(pattern_file(), False), inspect.signature(init))
    for _ in range(2):
        args, kwargs = before(None, "glm", '{"a": 1}')
        assert json.loads(args[2]) == json.loads(Serving(pattern_file(), False).merged('{"a": 1}')) and not kwargs
    assert checked == ["glm"]  # read once, however many configurations SGLang builds
    args, _ = before(None, "glm", is_draft_model=True)
    assert args[2] == "{}"


@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize("target", list(serving._PARAMETERS))
def test_each_missing_hook_target_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module_name, class_name, method = target.rsplit(".", 2)
    owner = getattr(importlib.import_module(module_name), class_name)
    serving._probe(target, serving._PARAMETERS[target])
    with pytest.raises(serving.HookError, match="no parameter sharing"):
        serving._probe(target, {"sharing"})
    if method == "__init__":
        monkeypatch.delattr(f"{module_name}.{class_name}")
    else:
        monkeypatch.delattr(owner, method)
    with pytest.raises(serving.HookError, match=f"this SGLang has no {target}"):
        serving._probe(target, set())
