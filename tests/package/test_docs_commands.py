"""Commands of README and how-tos, as written: each is read by its own parser, and what needs no GPU runs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from indexcache_launch.launch_line import LaunchLine
from sglang_indexcache import check
from sglang_indexcache.sglang.asked import split_arguments
from tests.conftest import tiny_config
from tests.package.test_docs import APPS, HOW_TO, ROOT, name_of

PAGES = [ROOT / "README.md", ROOT / "docs" / "faq.md", *HOW_TO]
SERVERS = ("sglang.launch_server", "sglang_indexcache.launch_server", "serve")


def lines_of(path: Path) -> list[list[str]]:
    """The words of each line that a page shows to be run, one command each."""
    joined = path.read_text().replace("\\\n", " ").splitlines()
    shown = [shlex.split(line, comments=True) for line in joined if re.match(r"    [^ ]", line)]
    return [words for words in shown if words]


def commands_of(path: Path, *names: str) -> list[tuple[str, list[str]]]:
    """Name and arguments of the commands with these names, behind variables and `scripts/run.sh` or not."""
    found = []
    for words in lines_of(path):
        for place, word in enumerate(words):
            if word in names and "pip" not in words:
                found.append((word, words[place + 1 :]))
                break
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_each_command_is_read_by_its_own_parser(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values, too: a setting that was renamed is found, which a look at flags is not."""
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"--config (\S+\.yaml)", path.read_text()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name, words in commands_of(path, *APPS):
        command = typer.main.get_command(importlib.import_module(APPS[name]).app)
        try:
            command.make_context(name, words)
        except (typer.Exit, SystemExit):
            pytest.fail(f"{shlex.join([name, *words])}: {capsys.readouterr().err}")


def test_a_command_that_is_wrong_is_found() -> None:
    command = typer.main.get_command(importlib.import_module(APPS["indexcache-search"]).app)
    with pytest.raises((typer.Exit, SystemExit)):
        command.make_context("indexcache-search", ["--strategy", "greedy:block=4"])


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_each_launch_line_is_read_as_sglang_reads_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, words in commands_of(path, *SERVERS):
        of_sglang = split_arguments(words)[1]
        line = LaunchLine.parse(of_sglang)
        assert not line.unread, (name, line.unread)
        assert line.model_path or line.given, words


@pytest.fixture
def a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of what pages read, beside config.json of GLM-5's and Qwen3's numbers of layers."""
    monkeypatch.chdir(tmp_path)
    files = Path("extras/published/indexcache_published/files")
    shutil.copytree(ROOT / files, tmp_path / files)
    heads = {"num_attention_heads": 64, "num_key_value_heads": 64}
    folder = tmp_path / "zai-org" / "GLM-5-FP8"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(layers=78, **heads)))
    return tmp_path


def test_the_first_half_hour_runs_as_written(a_deployment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--known`, the copy of a published file, whether it fits, and what a pasted flag alone would run."""
    page, codes = ROOT / "docs" / "glm5-deepseek.md", []
    for words in lines_of(page):
        if words[0] == "mkdir":
            subprocess.run(shlex.join(words).replace("'&&'", "&&"), shell=True, check=True)
        elif words[0] == "indexcache-check" and not {"--server", "--environment"} & set(words):
            codes.append((check.main(words[1:]), capsys.readouterr().out))
    assert [code for code, _ in codes] == [0, 0, 1]
    known, fits, pasted = (text for _, text in codes)
    assert "GLM-5: GlmMoeDsaForCausalLM, 78 layers" in known
    assert "22 of 78 layers F" in fits and "no problems" in fits and "--json-model-override-args" in fits
    assert "SGLang 0.5.20 to 0.5.23 ignores index_topk_freq" in pasted


def test_letters_of_another_model_are_refused_as_the_questions_say(
    a_deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line of the table of refusals is one that a command prints."""
    assert check.main(["F" * 61, "--model", "zai-org/GLM-5-FP8"]) == 1
    [line] = re.findall(r"`(pattern has 61 letters[^`]*)`", (ROOT / "docs" / "faq.md").read_text())
    assert f"problem: {line}" in capsys.readouterr().out


SHORT = ["--num-sequences", "4", "--num-eval-sequences", "4"]


@pytest.mark.slow
def test_the_papers_search_runs_as_written_on_the_demo(tmp_path: Path) -> None:
    for name, words in commands_of(ROOT / "docs" / "paper-search.md", "indexcache-search", "indexcache-eval"):
        if "--model" in words:  # the user's own
            continue
        fewer = SHORT if name == "indexcache-search" else SHORT[:2]
        done = subprocess.run([Path(sys.executable).with_name(name), *words, *fewer], cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr
    for folder in ("greedy", "greedy-blocks", "uniform", "similarity", "lazy", "paper"):
        assert list((tmp_path / folder).glob("*.html"))
