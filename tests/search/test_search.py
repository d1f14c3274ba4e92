"""indexcache-search from the outside: files, resuming, refusals, exit codes."""

from __future__ import annotations

import json
import random
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from indexcache_search.cli.search import app
from indexcache_search.engines.settings import RunSettings
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.searching.job import Files, SearchData, SearchJob
from indexcache_search.searching.run import run as search
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies import strategy_of
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.io.messages import MODEL_CHANGED
from tests.conftest import LAYERS, tiny_config, tiny_model
from tests.forked import forked, killed_at

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("no_pictures")]


def arguments(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    fixed = ["--model", model, "--calibration", data, "--output", output, "--seq-len", "32", "--device", "cpu"]
    fixed += ["--num-sequences", "2", "--num-eval-sequences", "3", "--retain", "1/2,1/3", "--strategy", "greedy"]
    return [*map(str, fixed), *more]


def run(*options: str) -> Any:
    return CliRunner().invoke(app, list(options))


@pytest.fixture(scope="module")
def finished(model_folder: Path, token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a finished greedy search."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    result = run(*arguments(model_folder, token_file, folder))
    assert result.exit_code == 0, result.output
    return folder


def metrics(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return content


def test_greedy_writes_a_pattern_file_that_fits_the_model(finished: Path) -> None:
    file = PatternFile.load(finished / "pattern.yaml")
    file.model.check(describe(tiny_config(), "tiny"))
    assert len(file.as_pattern().full_layers) == 3
    assert len(file.pattern_at(Fraction(1, 3)).full_layers) == 2
    assert file.search is not None and file.calibration is not None
    assert file.search.evaluations == 5 + 4 + 3 + 2
    assert file.search.noise_floor == 0.0
    assert file.calibration.scored_tokens == 2 * (32 - 8 - 1)
    names = ["README.md", "indexcache-run.json", "metrics.json", "pattern.yaml", "report.html", "work"]
    assert sorted(path.name for path in finished.iterdir()) == names


def test_a_job_returns_what_it_writes_and_prints_nothing(
    model_folder: Path, token_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = SearchJob(
        model=str(model_folder),
        data=SearchData(
            calibration=(str(token_file),),
            evaluation=(str(token_file),),
            seq_len=32,
            num_sequences=2,
            num_eval_sequences=3,
        ),
        run=RunSettings(device="cpu"),
        settings=Settings(retain=(Fraction(1, 2),), strategy=strategy_of("uniform")),
        files=Files(folder=tmp_path / "out", work_dir=tmp_path / "out" / "work", restart=False),
    )
    capfd.readouterr()
    result = search(job)
    assert capfd.readouterr() == ("", "")
    assert json.loads(json.dumps(result.as_json())) == metrics(tmp_path / "out")
    assert result.pattern_file == PatternFile.load(tmp_path / "out" / "pattern.yaml")


def test_metrics_compare_all_patterns_on_held_out_data(finished: Path) -> None:
    result = metrics(finished)
    names = [(row["name"], row["retention"]) for row in result["held_out"]["rows"]]
    compared = [(name, kept) for kept in ("1/2", "1/3") for name in ("greedy", "similarity", "uniform phase 0")]
    assert sorted(names) == sorted([("baseline", "1"), *compared])
    assert result["held_out"]["rows"][0]["increase"]["mean"] == 0.0
    assert [step["full_layers"] for step in result["steps"]] == [5, 4, 3, 2]
    for step in result["steps"]:  # what was committed is the best candidate
        assert step["candidates"][str(step["layer"])] == min(step["candidates"].values()) == step["loss"]
    assert len(result["overlap"]) == LAYERS


def test_sources_with_a_loss_mask_show_accuracy(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in token_file.read_text().splitlines()]
    masked = tmp_path / "answers.jsonl"
    masked.write_text("".join(json.dumps({**row, "loss_mask": [0] * 28 + [1] * 4}) + "\n" for row in reversed(rows)))
    options = ["--evaluation", str(token_file), "--evaluation", str(masked), "--retain", "5/6"]
    result = run(*arguments(model_folder, token_file, tmp_path / "out", *options))
    assert result.exit_code == 0, result.output
    assert f"loading {model_folder}" in result.stderr.replace("\n", "")  # no bar shows it in a log file
    assert metrics(tmp_path / "out")["held_out"]["answer_sources"] == [str(masked)]
    assert re.search(r"│ +0\.\d{3} ", result.stdout)  # three digits: an accuracy


def test_running_again_changes_nothing_and_evaluates_nothing(
    finished: Path, model_folder: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (finished / "pattern.yaml").read_bytes()
    journal = (finished / "work" / "journal.jsonl").read_bytes()
    monkeypatch.setattr(TransformersEngine, "_hidden", None)
    assert run(*arguments(model_folder, token_file, finished)).exit_code == 0
    assert (finished / "pattern.yaml").read_bytes() == before
    assert (finished / "work" / "journal.jsonl").read_bytes() == journal


def test_strategies_share_the_journal(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    work = ("--work-dir", str(tmp_path / "work"))
    greedy = run(*arguments(model_folder, token_file, tmp_path / "greedy", *work))
    uniform = run(*arguments(model_folder, token_file, tmp_path / "uniform", *work, "--strategy", "uniform"))
    similar = run(*arguments(model_folder, token_file, tmp_path / "similar", *work, "--strategy", "similarity"))
    assert (greedy.exit_code, uniform.exit_code, similar.exit_code) == (0, 0, 0), uniform.output + similar.output
    file = PatternFile.load(f"{tmp_path / 'uniform' / 'pattern.yaml'}@1/3")
    assert file.as_pattern() == Pattern.uniform(LAYERS, 3)
    assert PatternFile.load(tmp_path / "uniform" / "pattern.yaml").as_pattern() == Pattern.uniform(LAYERS, 2)
    similarity = metrics(tmp_path / "similar")["similarity"]
    assert len(similarity) == LAYERS and similarity[1][0] > 0.1


def test_block_wise_search(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    assert run(*arguments(model_folder, token_file, tmp_path, "--strategy", "greedy:blocks=2")).exit_code == 0
    file = PatternFile.load(tmp_path / "pattern.yaml")
    assert file.search is not None and file.search.blocks == 2
    assert file.search.evaluations == 2 + 2 + 1 + 1
    assert all(pattern[0] == pattern[3] == "F" for pattern in file.trajectory_patterns())


@pytest.mark.parametrize("strategy", ["lazy", "exhaustive"])
def test_every_strategy_ends_with_files(model_folder: Path, token_file: Path, tmp_path: Path, strategy: str) -> None:
    options = ["--strategy", f"{strategy}:swaps=4", "--num-sequences", "6"]
    result = run(*arguments(model_folder, token_file, tmp_path, *options))
    assert result.exit_code == 0, result.output
    file, found = PatternFile.load(tmp_path / "pattern.yaml"), metrics(tmp_path)
    assert file.search is not None and file.search.strategy == strategy
    assert [len(file.pattern_at(kept).full_layers) for kept in (Fraction(1, 2), Fraction(1, 3))] == [3, 2]
    assert len(file.trajectory) == (4 if strategy == "lazy" else 0)
    assert found["cost"]["sequences"] == file.search.evaluated_sequences
    assert 0 < found["cost"]["layer_tokens"] <= found["cost"]["sequences"] * 32 * LAYERS
    assert found["cost"]["algorithm_1_layer_tokens"] == (5 + 4 + 3 + 2) * 6 * 32 * LAYERS
    assert "of the layer-tokens of Algorithm 1" in result.stdout


def test_exhaustive_is_never_worse(finished: Path, model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    assert run(*arguments(model_folder, token_file, tmp_path, "--strategy", "exhaustive")).exit_code == 0
    best, greedy = (PatternFile.load(folder / "pattern.yaml") for folder in (tmp_path, finished))
    assert best.search is not None and greedy.search is not None
    assert best.search.loss <= greedy.search.loss
    assert best.search.evaluations == 10 + 5  # 3 and 2 F layers of 6, the first one given


def test_kl_objective(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    assert run(*arguments(model_folder, token_file, tmp_path, "--objective", "kl")).exit_code == 0
    file = PatternFile.load(tmp_path / "pattern.yaml")
    assert file.search is not None
    assert file.search.baseline_loss == 0.0 < file.search.loss


def test_locked_layers_stay_shared(token_file: Path, tmp_path: Path) -> None:
    config = tiny_config(indexer_types=indexer_types(Pattern("FFSFFF")))
    tiny_model(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = run(*arguments(tmp_path / "model", token_file, tmp_path / "out"))
    assert result.exit_code == 0, result.output
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml")
    assert file.model.locked_layers == (2,)
    assert all(pattern[2] == "S" for pattern in file.trajectory_patterns())
    names = {row["name"] for row in metrics(tmp_path / "out")["held_out"]["rows"]}
    assert "uniform phase 0" in names  # FSFSFS needs layer 2, FSSFSS does not


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--retain", "0/4"], "retention is 0/4"),
        (["--retain", "1/2,x"], "retention is 'x'"),
        (["--retain", "2/3", "--strategy", "uniform"], "retentions of the form 1/n, found 2/3"),
        (["--strategy", "greedy:blocks=3", "--retain", "1/3"], "blocks=3 keeps 3"),
        (["--strategy", "lazy:blocks=3"], "lazy has no setting blocks, expected flips, race, swaps"),
        (["--seq-len", "9"], "--seq-len is 9"),
        (["--seq-len", "300"], "made for 256 tokens"),
        (["--num-sequences", "99"], "99 were asked for"),
        (["--dtype", "int4"], "--dtype is int4"),
        (["--device", "cuda:7"], "--device is cuda:7"),
        (["--calibration", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    model_folder: Path, token_file: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    result = run(*arguments(model_folder, token_file, tmp_path / "out", *options))
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("indexcache-search: ") and message in lines[0]
    assert not (tmp_path / "out" / "pattern.yaml").exists()


def test_models_and_data_that_are_missing(token_file: Path, tmp_path: Path) -> None:
    for options, message in (
        (["--model", str(tmp_path), "--calibration", str(token_file)], "config.json: No such file or directory"),
        (["--model", str(tmp_path)], "--calibration is missing"),
    ):
        result = run(*options)
        assert result.exit_code == 2 and message in result.stderr
    result = run("--strategy", "best")
    names = "lazy, greedy, exhaustive, uniform, similarity, recall, shift"
    assert result.exit_code == 2 and f"'--strategy': found 'best', expected one of {names}" in result.stderr


def test_another_search_in_the_same_folder_is_refused(
    finished: Path, model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    before = (finished / "pattern.yaml").read_bytes()
    result = run(*arguments(model_folder, token_file, finished, "--seed", "5"))
    assert result.exit_code == 2 and "belongs to a search with calibration" in result.stderr
    assert (finished / "pattern.yaml").read_bytes() == before
    work = ["--work-dir", str(tmp_path / "work")]
    assert run(*arguments(model_folder, token_file, tmp_path / "a", *work)).exit_code == 0
    assert run(*arguments(model_folder, token_file, tmp_path / "a", *work, "--seed", "5", "--restart")).exit_code == 0


def test_results_of_two_runs_never_stand_together(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Nor is anything of somebody else's written over, and a folder belongs to one command."""
    first = arguments(model_folder, token_file, tmp_path)
    for name in ("notes.txt", "report.html"):
        (tmp_path / name).write_text("mine")
    for more, message in (
        ((), "report.html: is there already, and no indexcache-run.json says that indexcache-search wrote it"),
        (("--restart",), "report.html: is there already"),
        (("--work-dir", str(model_folder)), "what is read and what is written overlap"),
    ):
        result = run(*first, *more)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    assert not (tmp_path / "metrics.json").exists() and (tmp_path / "report.html").read_text() == "mine"
    (tmp_path / "report.html").unlink()
    assert run(*first).exit_code == 0
    before = (tmp_path / "metrics.json").read_bytes()
    (tmp_path / "report.html").write_text("mine")
    result = run(*first)
    assert result.exit_code == 2 and "was changed since indexcache-search wrote it" in " ".join(result.stderr.split())
    assert (tmp_path / "metrics.json").read_bytes() == before and (tmp_path / "report.html").read_text() == "mine"
    twice = ("--evaluation", str(token_file), "--evaluation", str(token_file))
    result = run(*arguments(model_folder, token_file, tmp_path / "out", *twice))
    assert result.exit_code == 2 and "stands there twice as evaluation source" in " ".join(result.stderr.split())


def test_a_loss_that_is_not_finite_stops_the_run(token_file: Path, tmp_path: Path) -> None:
    config = tiny_config()
    model = tiny_model(config)
    with torch.no_grad():
        model.lm_head.weight[7] = 3e38  # a number, but no logit comes out of it
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = run(*arguments(tmp_path / "model", token_file, tmp_path / "out"))
    assert result.exit_code == 1
    assert re.search(
        r"loss is (nan|inf) on sequence 0 \(.*\) with pattern FFFFFF; stopped", result.stderr.replace("\n", "")
    )
    assert not (tmp_path / "out" / "pattern.yaml").exists()


def test_ctrl_c_leaves_a_valid_partial_trajectory(
    model_folder: Path, token_file: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = TransformersEngine._score, []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2 * (2 + 5 + 4) + 3:  # two baselines, two whole steps, in the middle of the third
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "_score", interrupted)
        result = run(*arguments(model_folder, token_file, tmp_path))
    assert result.exit_code == 130 and "the same command goes on from here" in result.stderr
    partial = PatternFile.load(tmp_path / "work" / "pattern.partial.yaml")
    whole = PatternFile.load(finished / "pattern.yaml")
    assert len(partial.trajectory) == 2 and partial.trajectory == whole.trajectory[:2]
    assert run(*arguments(model_folder, token_file, tmp_path)).exit_code == 0
    assert PatternFile.load(tmp_path / "pattern.yaml") == whole
    assert not (tmp_path / "work" / "pattern.partial.yaml").exists()


def test_ctrl_c_leaves_the_patterns_found_so_far(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("indexcache_search.searching.run.comparison_lines", interrupted)
    assert run(*arguments(model_folder, token_file, tmp_path, "--strategy", "lazy")).exit_code == 130
    partial = PatternFile.load(tmp_path / "work" / "pattern.partial.yaml")
    assert [len(partial.pattern_at(kept).full_layers) for kept in (Fraction(1, 2), Fraction(1, 3))] == [3, 2]


@pytest.mark.parametrize("strategy", ["lazy", pytest.param("exhaustive", marks=pytest.mark.slow)])
def test_every_strategy_goes_on_to_the_identical_file(
    model_folder: Path, token_file: Path, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(folder: Path) -> Any:
        more = ["--strategy", f"{strategy}:swaps=4", "--num-sequences", "6"]
        return run(*arguments(model_folder, token_file, folder, *more))

    original, calls = TransformersEngine._score, []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) % 43 == 0:  # loses up to an evaluation each time
            raise KeyboardInterrupt
        return original(self, *args)

    assert search(tmp_path / "reference").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "_score", interrupted)
        codes = [search(tmp_path / "out").exit_code]
        while codes[-1] == 130:
            codes.append(search(tmp_path / "out").exit_code)
    assert codes[-1] == 0 and len(codes) >= 3
    files = [tmp_path / name / "pattern.yaml" for name in ("reference", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_weights_that_change_under_a_search(
    finished: Path, model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file says that it is of one model when it is of two; with the old weights back, the rest is as if alone."""
    folder, kept = shutil.copytree(model_folder, tmp_path / model_folder.name), tmp_path / "kept"
    output, path, hidden, runs = tmp_path / "out", folder / "model.safetensors", TransformersEngine._hidden, [0]
    shutil.copy(path, kept)
    other = kept.read_bytes()[:-4000] + bytes(4000)

    def change(*given: Any) -> Any:
        runs[0] += 1
        if runs[0] == 9:
            with path.open("r+b") as file:  # the file that is loaded, not one in its place
                file.write(other)
        return hidden(*given)

    monkeypatch.setattr(TransformersEngine, "_hidden", change)
    result = run(*arguments(folder, token_file, output))
    assert result.exit_code == 2 and f"model.safetensors: {MODEL_CHANGED}" in " ".join(result.output.split())
    assert not (output / "pattern.yaml").exists() and not (output / "metrics.json").exists()
    result = run(*arguments(folder, token_file, output))
    assert result.exit_code == 2 and "weights_sha256" in result.output
    shutil.copy(kept, path)
    runs[0] = 9
    assert run(*arguments(folder, token_file, output)).exit_code == 0
    assert runs[0] == 9  # the journal has it all
    assert (output / "pattern.yaml").read_bytes() == (finished / "pattern.yaml").read_bytes()


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_end_in_identical_files(
    kills: int, model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    def finish(folder: Path) -> str:
        result = run(*arguments(model_folder, token_file, folder))
        assert result.exit_code == 0, result.output
        return re.sub(r"^created: .*\n", "", (folder / "pattern.yaml").read_text(), flags=re.MULTILINE)

    reference = finish(tmp_path / "reference")
    whole = (tmp_path / "reference" / "work" / "journal.jsonl").read_bytes().count(b"\n")
    draw, interrupted = random.Random(7), 0
    for number in range(kills):
        folder = tmp_path / str(number)
        process = forked("indexcache_search", arguments(model_folder, token_file, folder))
        killed_at(process, folder / "work" / "journal.jsonl", draw.randint(0, whole), draw.uniform(0.0, 0.03))
        interrupted += not (folder / "pattern.yaml").exists()
        assert finish(folder) == reference
    assert 2 * interrupted >= kills, "kills came too late to say anything"


def test_a_search_whose_result_nobody_can_print(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """On a full device, in ASCII, on 20 columns: its files are written, and one line says what could not be."""
    folder, log = tmp_path / "a[b]c [/b] :x:", tmp_path / "log"
    words = arguments(model_folder, token_file, folder, "--strategy", "uniform", "--retain", "1/2")
    streams = {"stdout": "/dev/full", "stderr": str(log), "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    process = forked("indexcache_search", words, **streams)
    process.join(120)
    said = log.read_text()
    assert process.exitcode == 2 and said.splitlines()[-1] == "indexcache-search: stdout: No space left on device"
    assert "Traceback" not in said
    assert {"pattern.yaml", "metrics.json"} <= {path.name for path in folder.iterdir()}
