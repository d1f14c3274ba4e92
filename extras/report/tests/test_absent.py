"""Commands where nothing makes pages: they write their other files, and say in a line what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from indexcache_report.pages import HTML
from indexcache_search.cli import evaluate, search
from indexcache_search.results import pages
from sglang_indexcache.check import main
from tests.search.test_compare import options
from tests.search.test_search import arguments


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.pages() is HTML
    monkeypatch.setattr(pages, "extensions", lambda group, kind: {})


def names(folder: Path) -> str:
    return " ".join(sorted(path.name for path in folder.iterdir()))


@pytest.mark.usefixtures("absent")
def test_a_search_writes_its_pattern_and_its_metrics(
    model_folder: Path, token_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    done = CliRunner().invoke(search.app, arguments(model_folder, token_file, folder))
    assert done.exit_code == 0, done.output
    assert done.stderr.count(pages.UNWRITTEN) == 1
    assert f"report.html and README.md are {pages.UNWRITTEN}\n" in done.stderr
    assert names(folder) == "indexcache-run.json metrics.json pattern.yaml work"
    wrote, judge, check, serve = done.stdout.splitlines()[-4:]
    assert wrote == f"Wrote {folder / 'pattern.yaml'}, {folder / 'metrics.json'}"
    assert judge.startswith(f"Next: indexcache-eval --pattern {folder / 'pattern.yaml'} --tasks ")
    assert check.strip() == f"indexcache-check {folder / 'pattern.yaml'} --model {model_folder}"
    assert serve.strip().endswith(f"--indexcache-pattern {folder / 'pattern.yaml'} --model-path {model_folder}")
    assert main([str(folder)]) == 0
    assert "its 2 files belong together" in capsys.readouterr().out
    (folder / "report.html").write_text("of another search")
    assert main([str(folder)]) == 1
    assert "report.html: indexcache-run.json does not list it" in capsys.readouterr().out


@pytest.mark.usefixtures("absent")
def test_a_comparison_writes_its_numbers(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = CliRunner().invoke(evaluate.app, [*options(model_folder, token_file, folder), "--pattern", "FSSFSS"])
    assert done.exit_code == 0, done.output
    assert done.stderr.count(pages.UNWRITTEN) == 1 and f"eval.html is {pages.UNWRITTEN}\n" in done.stderr
    assert names(folder) == "eval.json indexcache-run.json work"
    assert done.stdout.splitlines()[-1] == f"Wrote {folder / 'eval.json'}"
    assert json.loads((folder / "eval.json").read_text())["findings"]


@pytest.mark.usefixtures("no_pictures")
def test_pages_of_an_earlier_run_do_not_outlive_its_numbers(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*options(model_folder, token_file, tmp_path / "out"), "--pattern", "FSSFSS"]
    assert CliRunner().invoke(evaluate.app, words).exit_code == 0
    assert (tmp_path / "out" / "eval.html").exists()
    monkeypatch.setattr(pages, "extensions", lambda group, kind: {})
    done = CliRunner().invoke(evaluate.app, words)
    assert (
        done.exit_code == 0 and f"removed {tmp_path / 'out' / 'eval.html'}, which an earlier run wrote" in done.stderr
    )
    assert not (tmp_path / "out" / "eval.html").exists()
