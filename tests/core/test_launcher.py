"""The launcher's own flags: split off, checked before SGLang is imported, and handed on by the environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache import launch_server
from sglang_indexcache.io import refusal
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.launch_server import check_plugin_is_found
from sglang_indexcache.sglang.asked import Asked, LaunchError, split_arguments

HAS_SGLANG = importlib.util.find_spec("sglang") is not None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "8"], ({}, ("--tp", "8"))),
        (["--indexcache-pattern", "a@1/4", "--tp", "8"], ({"pattern": "a@1/4"}, ("--tp", "8"))),
        (["--tp=8", "--indexcache-pattern=a"], ({"pattern": "a"}, ("--tp=8",))),
        (
            ["--indexcache-allow-config-mismatch", "--indexcache-pattern", "a"],
            ({"pattern": "a", "allow_mismatch": True}, ()),
        ),
        (["--indexcache-calibrate", "--tp", "8"], ({"calibrate": True}, ("--tp", "8"))),
        (["--indexcache-shard-indexers", "--tp", "8"], ({"shard": True}, ("--tp", "8"))),
        (["--indexcache-pattern", "a", "--indexcache-shard-indexers"], ({"pattern": "a", "shard": True}, ())),
        (["--indexcache-union-attention", "--tp", "8"], ({"unions": True}, ("--tp", "8"))),
        (["--indexcache-no-grouping", "--indexcache-pattern", "a"], ({"pattern": "a", "ungrouped": True}, ())),
        (
            ["--json-model", '{"a": -1}', "--indexcache-pattern", "a", "--json-model={}", "--config", "-c.yaml"],
            ({"pattern": "a"}, ("--json-model", '{"a": -1}', "--json-model={}", "--config", "-c.yaml")),
        ),
    ],
)
def test_our_flags_are_split_off(arguments: list[str], expected: Any) -> None:
    asked, rest = split_arguments(arguments)
    assert (asked, rest) == (Asked(**expected[0]), expected[1])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--indexcache-pattern"],
        ["--indexcache-pattern", "--tp"],
        ["--indexcache-pattern="],
        ["--indexcache-pattern=--"],
        ["--indexcache-pattern=a"] * 2,
        ["--indexcache-pattern=a", "--indexcache-calibrate"],
        ["--indexcache-shard-indexers", "--indexcache-calibrate"],
        ["--indexcache-shard", "--indexcache-pattern", "a"],
        ["--indexcache-no-grouping", "--indexcache-calibrate"],
        ["--indexcache-union-attention", "--indexcache-calibrate"],
        ["--indexcache-pat", "a"],
        ["--indexcache-pattern", "a", "--indexcache-cal"],
        ["--indexcache_pattern=a"],
        ["--indexcache-pattern", "a", "--indexcache-calibrate=1"],
    ],
)
def test_a_flag_that_is_not_quite_ours_has_no_value_or_is_there_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(LaunchError, match="--indexcache-"):
        split_arguments(arguments)


def test_the_key_of_a_calibration_server_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the process list nor the server's own processes have it; a key may begin with a dash."""
    monkeypatch.setattr(launch_server, "check_plugin_is_found", lambda: None)
    monkeypatch.setenv(refusal.ADMIN_KEY_VARIABLE, "-secret")
    monkeypatch.setenv(refusal.CALIBRATE_VARIABLE, "")
    words = list(launch_server.prepare(["--indexcache-calibrate", "--model-path", "x", "--admin-api", "own"]))
    assert "--api-key=-secret" in words  # SGLang shows the other one in /server_info
    assert words.index("--admin-api-key=-secret") < words.index("--admin-api") and words[-2:] == ["--admin-api", "own"]
    assert refusal.ADMIN_KEY_VARIABLE not in os.environ
    assert not any("--admin-api-key" in word for word in launch_server.prepare(["--indexcache-calibrate"]))


def test_the_users_words_reach_sglang_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put among the model overrides, which the user may spell as SGLang's parser allows."""
    monkeypatch.setattr(launch_server, "check_plugin_is_found", lambda: None)
    for name in (refusal.PATTERN_VARIABLE, refusal.ALLOW_MISMATCH_VARIABLE):
        monkeypatch.setenv(name, "")
    words = ("--json-model-override", '{"rope_theta": 7}', "--config=c.yaml", "--json-model-override-args={}")
    assert launch_server.prepare(["--indexcache-pattern", "FSSFSS", *words]) == words
    assert os.environ[refusal.PATTERN_VARIABLE] == "FSSFSS"


def test_a_model_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang would end with a traceback. What is no path of a folder is SGLang's to find, or not."""
    monkeypatch.setattr(launch_server, "check_plugin_is_found", lambda: None)
    for name in (refusal.PATTERN_VARIABLE, refusal.ALLOW_MISMATCH_VARIABLE):
        monkeypatch.setenv(name, "")
    with pytest.raises(ModelConfigError, match="none: no such folder, and not a hub id like owner/name"):
        launch_server.prepare(["--indexcache-pattern=FS", f"--model={tmp_path}/none"])
    for model in (str(tmp_path), "owner/name", "s3://bucket/model", "7"):
        assert launch_server.prepare(["--indexcache-pattern=FS", "--model-path", model]) == ("--model-path", model)


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
