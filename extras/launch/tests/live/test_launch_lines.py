"""Launch lines as SGLang's own parser reads them, and the table of its options; no server is started."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest
import yaml

from extras.launch.tests.launch_lines import mutations
from indexcache_launch.launch_line import LaunchLine, Readings
from indexcache_launch.options import installed_parser, parser_of, versions
from sglang_indexcache.sglang.probes import SglangSource

pytestmark = pytest.mark.sglang
arguments = pytest.importorskip("sglang.srt.server_args", reason="SGLang is not installed")


def installed() -> SglangSource:
    source = SglangSource.installed()
    assert source is not None
    return source


def facts(action: argparse.Action) -> tuple[object, ...]:
    choices = None if action.choices is None else sorted(map(str, action.choices))
    return action.dest, action.nargs, choices


def test_the_table_has_the_options_of_the_installed_parser() -> None:
    """A wheel is read without running it; what its parser says at last is what counts."""
    source = installed()
    if source.version not in versions():
        pytest.skip(f"the table has no SGLang {source.version}")
    own, table = installed_parser(source.version), parser_of(source.version)
    assert own is not None and own.flags().keys() == table.flags().keys()
    for flag, action in own.flags().items():
        expected, found = facts(action), facts(table.flags()[flag])
        assert found[:2] == expected[:2], flag
        assert found[2] in (None, expected[2]), flag  # choices that are computed are not in the table
    literal = {name: value for name, value in table.defaults.items() if value is not None}
    assert {name: own.defaults[name] for name in literal} == literal


def test_a_thousand_lines_are_read_as_sglang_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever SGLang's parser takes is read to the same values, and what it refuses is named."""
    monkeypatch.chdir(tmp_path)
    own = installed_parser(installed().version)
    assert own is not None
    taken = refused = 0
    for words, content in mutations(1000, random.Random(41)):
        if content is not None:
            (tmp_path / "server.yaml").write_text(yaml.safe_dump(content))
        line = LaunchLine.parse(words, own)
        expected = parsed(words)
        if expected is None:
            refused += 1
            assert line.unread, words
            continue
        taken += 1
        unread = [item for item in line.unread if "would be ignored" not in item.why]
        assert not unread, (words, unread)
        for name, value in line.given.items():
            assert getattr(expected, name) == value, (words, name)
    assert taken > 300 and refused > 100


def parsed(words: list[str]) -> argparse.Namespace | None:
    """What `sglang.launch_server` would parse, up to where it builds its server arguments; `None` if it refuses."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser(prog="sglang serve")
    arguments.ServerArgs.add_cli_args(parser)
    try:
        if "--config" in words:
            words = ConfigArgumentMerger(parser).merge_config_with_args(words)
        return parser.parse_args(["--model-path", "x", *words])
    except (SystemExit, ValueError):
        return None


def test_the_launcher_and_check_use_the_installed_parser() -> None:
    found = Readings.of(["--speculative-algo", "EAGLE", "--attn-dp-size", "2"], installed())
    assert found.own and not found.others
    assert found.lines[0].given == {"speculative_algorithm": "EAGLE", "attn_dp_size": 2}
