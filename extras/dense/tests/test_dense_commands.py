"""Dense models on the command line: search and comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_dense.reuse import ReusePolicy
from indexcache_search.cli.evaluate import app as eval_app
from indexcache_search.cli.search import app as search_app
from sglang_indexcache import PatternFile
from tests.conftest import LAYERS, PAGES

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("no_pictures")]

BUDGET = "pages=4,page_tokens=4,recent_pages=1"


def options(model: Path, data: Path, output: Path, *more: str, selection: str = BUDGET) -> list[str]:
    fixed = ["--model", model, "--calibration", data, "--output", output, "--seq-len", "32", "--device", "cpu"]
    fixed += ["--num-sequences", "3", "--num-eval-sequences", "3", "--retain", "1/2,1/3", "--selection", selection]
    return [*map(str, fixed), *more]


def run(app: Any, *arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def found(dense_folder: Path, token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("found") / "out"
    result = run(search_app, *options(dense_folder, token_file, output))
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith(f"--model-path {dense_folder} --attention-backend flashinfer --page-size 4")
    return output


def test_a_search_writes_a_file_of_pages(found: Path) -> None:
    file = PatternFile.load(found / "pattern.yaml")
    assert file.selection == PAGES and file.as_pattern().full_layers[0] == 0
    assert [len(file.pattern_at(kept).full_layers) for kept in (Fraction(1, 2), Fraction(1, 3))] == [3, 2]
    content = json.loads((found / "metrics.json").read_text())
    names = {(row["name"], row["retention"]) for row in content["held_out"]["rows"]}
    wanted = {(name, kept) for name in ("lazy", "shift", "recall", "uniform phase 0") for kept in ("1/2", "1/3")}
    assert names == {("baseline", "1"), *wanted}
    assert len(content["shift"][0]) == len(content["recall"]) == LAYERS and "similarity" not in content
    assert "4 pages of 4 tokens" in (found / "report.html").read_text()
    assert "--attention-backend flashinfer --page-size 4\n" in (found / "README.md").read_text()


def test_a_search_with_memory(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """The policy is in the file, and in what was evaluated."""
    result = run(search_app, *options(dense_folder, token_file, tmp_path, selection=f"{BUDGET},steps=refresh:4"))
    assert result.exit_code == 0, result.output
    file = PatternFile.load(tmp_path / "pattern.yaml")
    assert file.selection == replace(PAGES, steps=ReusePolicy.parse("refresh:4"))
    wrong = run(search_app, *options(dense_folder, token_file, tmp_path, selection="pages=4,steps=none/ema:0.9"))
    assert wrong.exit_code == 2 and "--selection names 2 selections, expected one" in wrong.output


@pytest.mark.parametrize(
    "strategy",
    [
        "exhaustive",
        "shift",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("greedy", "lazy", "uniform", "recall")),
    ],
)
def test_every_strategy(strategy: str, found: Path, dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    result = run(search_app, *options(dense_folder, token_file, tmp_path, "--strategy", strategy))
    assert result.exit_code == 0, result.output
    file = PatternFile.load(tmp_path / "pattern.yaml")
    assert file.selection == PAGES and len(file.as_pattern().full_layers) == 3
    if strategy == "exhaustive":  # the truth, which the default may miss but not beat
        assert file.search is not None
        assert file.search.loss <= PatternFile.load(found / "pattern.yaml").search.loss + 1e-9  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "similarity"], "--strategy similarity can't be had with transformers"),
        (["--engine", "sglang"], "--engine sglang does not search LlamaForCausalLM; expected transformers"),
        (["--selection", f"{BUDGET.removesuffix('1')}4"], "pages is 4, expected more than recent_pages (4)"),
        (["--selection", "page_tokens=3"], "page_tokens is 3, expected a power of two"),
        (["--seq-len", "17"], "--seq-len is 17, but queries see every token up to position 16"),
    ],
)
def test_refusals(more: list[str], message: str, dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    result = run(search_app, *options(dense_folder, token_file, tmp_path, *more))
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


def test_flags_of_dense_models_on_others(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    result = run(search_app, *options(model_folder, token_file, tmp_path))
    assert result.exit_code == 2 and "has indexers that choose; expected no selection" in result.output
    plain = [item for item in options(model_folder, token_file, tmp_path) if item not in ("--selection", BUDGET)]
    result = run(search_app, *plain, "--strategy", "shift")
    assert result.exit_code == 2 and "--strategy shift is for dense models" in result.output


def test_one_journal_keeps_selections_apart(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Sinks don't change which tokens count, so the work dense_folder may be the same; nothing else is."""
    files = {}
    for name, more in (("one", ""), ("other", ",sink_pages=1"), ("alone", ",sink_pages=1")):
        work = ("--work-dir", str(tmp_path / ("alone" if name == "alone" else "both")))
        selection = BUDGET + more
        result = run(search_app, *options(dense_folder, token_file, tmp_path / name, *work, selection=selection))
        assert result.exit_code == 0, result.output
        files[name] = PatternFile.load(tmp_path / name / "pattern.yaml")
        content = json.loads((tmp_path / name / "metrics.json").read_text())
        files[f"{name} recall"] = content["recall"]
    assert files["other"] == files["alone"] and files["other recall"] == files["alone recall"]
    assert files["one"].search != files["other"].search and files["one recall"] != files["other recall"]


def test_budgets_side_by_side(found: Path, dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    fixed = [
        "--model",
        dense_folder,
        "--evaluation",
        token_file,
        "--seq-len",
        "32",
        "--num-sequences",
        "6",
        "--device",
        "cpu",
    ]
    named = ["--pattern", f"{found / 'pattern.yaml'}@1/3", "--pattern", "mine=DDSSSS", "--output", tmp_path]
    pages = ["--selection", "pages=2/4/7,page_tokens=4,recent_pages=1"]
    result = run(eval_app, *map(str, [*fixed, *named, *pages]))
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "eval.json").read_text())
    rows = {row["name"]: row["increase"]["mean"] for row in content["held_out"]["rows"]}
    assert {"lazy, 2 pages", "mine, 4 pages", "mine, 7 pages", "uniform, mean of 3 phases, 7 pages"} <= set(rows)
    assert abs(rows["mine, 7 pages"]) < abs(rows["mine, 2 pages"])
    alone = run(eval_app, *map(str, [*fixed, *named[:2], "--output", tmp_path / "alone", "--no-uniform"]))
    assert alone.exit_code == 0, alone.output
    assert "lazy" in alone.output and "pages" not in alone.output
    rows = {row["name"]: row for row in json.loads((tmp_path / "alone" / "eval.json").read_text())["held_out"]["rows"]}
    flags = "--attention-backend flashinfer --page-size 4"
    assert rows["lazy"]["served"] == f"--indexcache-pattern {found / 'pattern.yaml'}@1/3 {flags}"
    served = {row["name"] for row in content["held_out"]["rows"] if "served" in row}
    assert served == {"lazy, 4 pages"}  # the file's own selection; no file has the others


def test_plans_without_a_d(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """F layers alone, by rounded keys: a pattern whose retention is 0."""
    fixed = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", "32", "--device", "cpu", "--no-uniform"]
    fixed += ["--num-sequences", "3", "--output", tmp_path, "--pattern", "own=FSSFSS", "--pattern", "wide=DSSDSS"]
    result = run(eval_app, *map(str, fixed), "--selection", f"{BUDGET},sink_pages=0,score=rounded_keys")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads((tmp_path / "eval.json").read_text())["held_out"]["rows"]}
    assert rows["own"]["retention"] == "0" and rows["own"]["increase"] != rows["wide"]["increase"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pattern", "DDSSSS", "--selection", "pages=x"], "'--selection': pages: found 'x', expected a whole number"),
        (["--pattern", "FFSSSS"], "pattern is of F and S without a selection, the model is dense"),
        (["--endpoint", "http://a", "--endpoint", "http://b"], "--endpoint reads the logprobs of prompts"),
    ],
)
def test_comparisons_that_are_refused(
    more: list[str], message: str, dense_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    fixed = ["--model", dense_folder, "--evaluation", token_file, "--seq-len", "32", "--output", tmp_path]
    result = run(eval_app, *map(str, fixed), *more)
    assert result.exit_code == 2 and message in result.output


def test_sequences_are_longer_than_the_largest_selection(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Else a selection that holds the whole sequence would look as if it lost nothing."""
    fixed = ["--model", dense_folder, "--evaluation", token_file, "--pattern", "D" + "S" * (LAYERS - 1), "--dry-run"]
    selection = "pages=2/3,page_tokens=4,recent_pages=1"
    result = run(eval_app, *map(str, [*fixed, "--selection", selection, "--num-sequences", 1, "--output", tmp_path]))
    assert result.exit_code == 0 and "1 sequences of 48 tokens" in result.output, result.output
    few = ["--selection", "pages=2/8,page_tokens=4,recent_pages=1", "--num-sequences", 1, "--seq-len", 32]
    result = run(eval_app, *map(str, [*fixed, *few, "--output", tmp_path]))
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "selections of 32 tokens hold whole sequences of 32: expected a larger" in said
