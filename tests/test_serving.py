"""The SGLang plugin on stand-ins: inert without a pattern, one line and an exit where it can't be exact.

The same against real SGLang is in tests/live.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_indexcache import Pattern, plugin, serving
from sglang_indexcache.hooks import refusing
from sglang_indexcache.launch_server import Arguments, LaunchError, check_plugin_is_found, split_arguments
from sglang_indexcache.serving import identity, proof
from sglang_indexcache.serving.proof import effective_roles, mark_unloaded, mismatch
from sglang_indexcache.serving.ranks import MEET_VARIABLE, ProofError, RankReport, _meet_seconds, disagreement
from sglang_indexcache.serving.request import Request
from tests.conftest import tiny_config
from tests.patterns import pattern_file

PATTERN = Pattern("FSSFSS")
REQUEST = Request("deploy.yaml@1/3", pattern_file(PATTERN, tiny_config()))
HAS_SGLANG = importlib.util.find_spec("sglang") is not None


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_pattern_the_plugin_does_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "install", lambda *_, **__: pytest.fail("installed"))
    monkeypatch.delenv(plugin.PATTERN_VARIABLE, raising=False)
    if value is not None:
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


# -- the launcher


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "8"], (None, False, False, ("--tp", "8"))),
        (["--indexcache-pattern", "a@1/4", "--tp", "8"], ("a@1/4", False, False, ("--tp", "8"))),
        (["--tp=8", "--indexcache-pattern=a"], ("a", False, False, ("--tp=8",))),
        (["--indexcache-allow-config-mismatch", "--indexcache-pattern", "a"], ("a", True, False, ())),
        (["--indexcache-calibrate", "--tp", "8"], (None, False, True, ("--tp", "8"))),
    ],
)
def test_our_flags_are_split_off(arguments: list[str], expected: Any) -> None:
    assert split_arguments(arguments) == Arguments(*expected)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--indexcache-pattern"],
        ["--indexcache-pattern", "--tp"],
        ["--indexcache-pattern="],
        ["--indexcache-pattern=a"] * 2,
        ["--indexcache-pattern=a", "--indexcache-calibrate"],
    ],
)
def test_a_pattern_flag_without_value_or_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(LaunchError, match="--indexcache-pattern"):
        split_arguments(arguments)


def test_the_launcher_needs_sglang_and_a_pattern() -> None:
    command = [sys.executable, "-m", "sglang_indexcache.launch_server", "--model-path", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    expected = "--indexcache-pattern is missing" if HAS_SGLANG else "SGLang is not installed"
    assert result.stderr.startswith(f"indexcache: {expected}") and result.stderr.count("\n") == 1


def test_a_server_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_indexcache.launch_server.find_spec", lambda _: object())
    check_plugin_is_found()
    monkeypatch.setenv("SGLANG_PLUGINS", "other, more")
    with pytest.raises(LaunchError, match="SGLANG_PLUGINS leaves the plugin out"):
        check_plugin_is_found()
    monkeypatch.setenv("SGLANG_PLUGINS", "other,indexcache")
    check_plugin_is_found()
    monkeypatch.setattr("sglang_indexcache.launch_server.entry_points", lambda group: [])
    with pytest.raises(LaunchError, match="sglang-indexcache is not installed"):
        check_plugin_is_found()


# -- the proof


class Attention(nn.Module):
    """Carries what SGLang's DSA attention modules carry."""

    def __init__(self, layer_id: int, role: str, indexer: bool = True, is_nextn: bool = False) -> None:
        super().__init__()
        self.layer_id, self.skip_topk, self.next_skip_topk = layer_id, role == "S", False
        self.indexer, self.is_nextn = (nn.ModuleDict({"wk": nn.Linear(2, 2)}) if indexer else None), is_nextn


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


def test_indexers_of_f_layers_that_nothing_was_loaded_into_are_found() -> None:
    model = loaded("FSSFSS")
    mark_unloaded(model)
    attentions = [item for item in model.modules() if isinstance(item, Attention)]
    assert all(attention.indexer.wk.weight.isnan().all() == (attention.layer_id in (0, 3)) for attention in attentions)
    for attention in attentions[:3]:
        nn.init.zeros_(attention.indexer.wk.weight)
        nn.init.zeros_(attention.indexer.wk.bias)
    nn.init.zeros_(attentions[3].indexer.wk.weight)
    line = mismatch(PATTERN, effective_roles(model))
    assert line == "layer 3 is F, but no weights were loaded into its indexer's wk.bias"
    nn.init.zeros_(attentions[3].indexer.wk.bias)
    assert mismatch(PATTERN, effective_roles(model)) is None


def test_ranks_must_agree_and_hold_all_layers() -> None:
    mine, other = PATTERN.fingerprint, Pattern("FFSFSS").fingerprint
    stages = [RankReport(mine, (0, 1, 2), None), RankReport(mine, (3, 4, 5), None)]
    assert disagreement(PATTERN, stages) is None
    assert disagreement(PATTERN, stages[:1]) == "layer 3 is on no rank, so its role can't be proven"
    line = disagreement(PATTERN, [stages[0], RankReport(other, (3, 4, 5), None)])
    assert line == (
        f"rank 1 serves a pattern with fingerprint {other[:16]}, rank 0 one with {mine[:16]}; "
        "expected the same file on every node"
    )
    assert disagreement(PATTERN, [stages[0], RankReport(mine, (3, 4, 5), "bad")]) == "rank 1: bad"


@pytest.mark.parametrize("text", ["", "0", "-1", "soon"])
def test_how_long_ranks_wait_for_each_other_is_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _meet_seconds() == 300
    monkeypatch.setenv(MEET_VARIABLE, text)
    with pytest.raises(ProofError, match=f"{MEET_VARIABLE} is '{text}', expected a number of seconds"):
        _meet_seconds()


def test_a_mismatch_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(proof, "all_ranks", lambda report: [report])
    prove = refusing(proof.prover(REQUEST))
    prove(None, SimpleNamespace(model=loaded("FSSFSS"), is_draft_worker=False))
    prove(None, SimpleNamespace(model=loaded("FFFFFF"), is_draft_worker=True))  # a draft model has no pattern
    with pytest.raises(SystemExit) as caught:
        prove(None, SimpleNamespace(model=loaded("FFFFFF"), is_draft_worker=False))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "indexcache: layer 1 would run as F, the pattern says S\n"


# -- status and identity


def test_the_status_is_added_to_the_internal_state() -> None:
    reply = SimpleNamespace(internal_state={"tp_size": 1})
    serving.status(REQUEST)(reply, None)
    assert reply.internal_state["indexcache"] == {
        "pattern": "FSSFSS",
        "fingerprint": PATTERN.fingerprint,
        "retention": 2 / 6,
        "full_layers": 2,
        "shared_layers": 4,
        "source": "deploy.yaml@1/3",
    }


def test_cache_keys_and_handshake_carry_the_pattern() -> None:
    tag = f"indexcache-{PATTERN.fingerprint[:16]}"
    for name, expected in (("glm", f"glm-{tag}"), (None, f"-{tag}")):
        config = SimpleNamespace(model_name=name)
        identity.cache_keys(REQUEST)(config)
        assert config.model_name == expected
    arguments = SimpleNamespace(kv_cache_dtype_str="bfloat16")
    for _ in range(2):
        identity.handshake(REQUEST)(None, arguments)
    assert arguments.kv_cache_dtype_str == f"bfloat16+{tag}"


def test_tensors_that_are_not_the_checkpoints_are_left_alone() -> None:
    model = loaded("FSSFSS")
    first = next(item for item in model.modules() if isinstance(item, Attention))
    first.indexer.wk.packed_weight = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    first.indexer.wk.input_scale = nn.Parameter(torch.ones(()))
    mark_unloaded(model)
    assert first.indexer.wk.packed_weight.eq(0).all() and first.indexer.wk.input_scale == 1


def test_the_launcher_says_a_mistake_in_the_file_at_once(tmp_path: Path) -> None:
    if not HAS_SGLANG:
        pytest.skip("SGLang is not installed")
    (tmp_path / "p.yaml").write_text("schema: indexcache/v1\n")
    command = [
        sys.executable,
        "-m",
        "sglang_indexcache.launch_server",
        "--indexcache-pattern",
        str(tmp_path / "p.yaml"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "model" in result.stderr
