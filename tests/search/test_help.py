"""What `--help` says: first what most people need, at any width, with examples that run."""

from __future__ import annotations

import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from indexcache_search.cli.help import ALL
from sglang_indexcache import check, launch_server
from sglang_indexcache.command_line import shown_command
from sglang_indexcache.sglang.asked import _SWITCHES, PATTERN_FLAG

MODULES = {
    "indexcache-search": "indexcache_search.cli.search",
    "indexcache-eval": "indexcache_search.cli.evaluate",
    "indexcache-distill": "indexcache_train.cli",
    "indexcache-offload": "indexcache_lab.offload.cli",
    "indexcache-watch": "indexcache_watch.cli",
}


@cache
def text_of(name: str, flag: str, width: int = 80) -> str:
    app = import_module(MODULES[name]).app
    done = CliRunner().invoke(app, [flag], prog_name=name, terminal_width=min(width, 110))
    assert done.exit_code == 0, done.output
    return done.output


def flags(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", MODULES)
def test_first_comes_what_most_people_need_and_the_rest_is_named(name: str) -> None:
    first, every = text_of(name, "--help"), text_of(name, ALL)
    assert flags(first) < flags(every) and len(flags(first)) <= 18
    [more] = re.findall(rf"^(\d+) more options: {name} {ALL}$", first, re.MULTILINE)
    assert int(more) == len(flags(every)) - len(flags(first))
    assert "Examples:" in first and "Exit codes" in every


def test_options_of_some_models_stand_apart() -> None:
    first, every = text_of("indexcache-search", "--help"), text_of("indexcache-search", ALL)
    assert not {"--selection", "--bytes", "--prefill", "--decode"} & flags(first)
    dense = every.partition("\nDense models:\n")[2].partition("\n\n")[0]
    blocks = every.partition("\nBlocks of queries (DeepSeek-V3.2, GLM-5):\n")[2].partition("\n\n")[0]
    assert flags(dense) == {"--selection", "--bytes"} and flags(blocks) == {"--prefill", "--decode"}


@pytest.mark.parametrize("width", [48, 80, 200])
@pytest.mark.parametrize("name", MODULES)
def test_it_is_as_wide_as_the_terminal(name: str, width: int) -> None:
    for line in text_of(name, ALL, width).splitlines():
        shown = line.removesuffix(" \\").split()
        alone = len(shown) <= 2  # a word, or a flag with its value, can't be parted
        assert len(line) <= min(width, 110) or alone, line


@pytest.mark.parametrize("width", [48, 64, 80, 200])
def test_so_is_that_of_the_check(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        check.main(["--help"])
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= width or re.match(r" *\[?--?\S+ ('.*'|\".*\"|\S+)$", line) or len(line.split()) == 1, line


def test_that_of_the_launcher_has_all_of_our_flags_in_80_columns() -> None:
    said = str(launch_server.__doc__)
    flags_of_ours = {PATTERN_FLAG, *(flag for flag, _ in _SWITCHES.values())}
    assert flags(said) == flags_of_ours and max(map(len, said.splitlines())) <= 80


def examples(text: str) -> list[list[str]]:
    """The words of each command that a help shows, as a shell reads them."""
    joined = text.replace(" \\\n", " ")
    shown = re.findall(r"^    ((?:indexcache-|python|torchrun).*)$", joined, re.MULTILINE)
    return [shlex.split(line) for line in shown]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_read_by_the_parser(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any width, and all of them: none has an ellipsis in the place of what is missing."""
    monkeypatch.chdir(tmp_path)
    Path("glm5.yaml").write_text("{}")
    command: Any = typer.main.get_command(import_module(MODULES[name]).app)
    found = examples(text_of(name, ALL, 48))
    assert found == examples(text_of(name, ALL, 200)) and len(found) >= 2
    for program, *words in found:
        assert "..." not in words
        if program == name:
            command.make_context(name, words)


def test_a_command_over_lines_is_the_same_command() -> None:
    command = (
        """indexcache-check FS --server-args "--tp 8 --dp 8" --json-model-override-args '{"index_topk_freq": 4}'"""
    )
    shown = shown_command(command, 40, "  ")
    assert shown.count("\\\n") == 2 and max(map(len, shown.splitlines())) < 60
    assert shlex.split(shown.replace("\\\n", " ")) == shlex.split(command)
