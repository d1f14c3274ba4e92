"""Check that uv is told of the indexes that pip is told of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.tools import pip_indexes


def test_nothing_is_said_of_what_pip_was_not_told() -> None:
    assert pip_indexes.options("global.timeout='60'\n:env:.disable-pip-version-check='1'\n") == []
    assert pip_indexes.options("") == []


def test_every_setting_of_an_index_is_passed_on() -> None:
    listed = """\
global.index-url='https://pypi.example/simple'
global.extra-index-url='https://a.example/simple https://b.example/simple'
install.find-links='/wheels\\n/more'
install.no-index='true'
global.trusted-host='a.example'
"""
    assert pip_indexes.options(listed) == [
        "--default-index=https://pypi.example/simple",
        "--index=https://a.example/simple",
        "--index=https://b.example/simple",
        "--find-links=/wheels",
        "--find-links=/more",
        "--allow-insecure-host=a.example",
        "--no-index",
        "--index-strategy=unsafe-best-match",
    ]


def test_a_variable_counts_before_a_file(tmp_path: Path) -> None:
    """As pip lists them: variables first."""
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://file.example/a=b\n[download]\nfind-links = /no\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    command = [sys.executable, pip_indexes.__file__]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "--default-index=https://file.example/a=b" in said and "--find-links=/no" not in said
    environment["PIP_INDEX_URL"] = "https://variable.example"
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "--default-index=https://variable.example" in said
