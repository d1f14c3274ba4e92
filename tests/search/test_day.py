"""A day on a rented node: one run file from a model to a pattern and its comparison, whenever the node goes away."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_search.cli.evaluate import app as eval_app
from indexcache_search.cli.search import app as search_app
from tests.forked import forked
from tests.search.test_fuzz import mutated

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("no_pictures")]
EFFORT = ("seconds", "layer_tokens", "share_of_algorithm_1")  # a kill loses the outputs of layers in memory
RUN = """\
model: {model}
seq_len: 32
device: cpu
search:
  calibration: {data}
  num_sequences: 2
  num_eval_sequences: 3
  retain: [1/2, 1/3]
  strategy: greedy
  output: {out}/search
eval:
  pattern: ["{out}/search/pattern.yaml@1/2", "half={out}/search/pattern.yaml@1/3"]
  evaluation: {data}
  num_sequences: 4
  output: {out}/eval
"""
DAY = ("indexcache_search", "tests.search.evaluating")  # indexcache-search, then indexcache-eval


def run_file(model: Path, data: Path, out: Path) -> Path:
    out.mkdir()
    path = out / "run.yaml"
    path.write_text(RUN.format(model=model, data=data, out=out))
    return path


def without_effort(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_effort(item) for key, item in value.items() if key not in EFFORT}
    return [without_effort(item) for item in value] if isinstance(value, list) else value


def results(out: Path) -> dict[str, Any]:
    """What a day leaves, less the effort that it took."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("*/*")):
        if path.is_dir() or path.name == "indexcache-run.json":
            continue
        text = path.read_text().replace(str(out), "OUT")
        if path.suffix == ".json":
            found[str(path.relative_to(out))] = without_effort(json.loads(text))
        else:
            text = re.sub(r"^created: .*\n", "", text, flags=re.MULTILINE)
            found[str(path.relative_to(out))] = re.sub(
                r"<dt>(cost|seconds)</dt><dd>.*?</dd>", "", text, flags=re.DOTALL
            )
    return found


def begin(number: int, file: Path, log: Path) -> Any:
    return forked(DAY[number], ["--config", file], stderr=str(log))


def finish(file: Path, log: Path) -> float:
    """Run what is left of a day; the seconds that it took."""
    began = time.monotonic()
    for number in range(len(DAY)):
        process = begin(number, file, log)
        process.join(300)
        assert process.exitcode == 0, log.read_text()
    return time.monotonic() - began


@pytest.mark.slow
def test_a_day_that_is_killed_ends_in_the_identical_folder(
    model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    """Whoever comes back runs the same commands again, from the first."""
    log, draw = tmp_path / "log", random.Random(11)
    whole = run_file(model_folder, token_file, tmp_path / "whole")
    finish(whole, log)
    shortest = finish(whole, log)  # what a day takes that was done before, and so any day at least
    file, kills = run_file(model_folder, token_file, tmp_path / "killed"), 0
    while kills < 5:
        left = draw.uniform(0.0, shortest)
        for number in range(len(DAY)):
            process, began = begin(number, file, log), time.monotonic()
            process.join(left)
            left = max(0.0, left - (time.monotonic() - began))
            if process.exitcode is None:
                process.kill()
                process.join()
                kills += 1
                break
            assert process.exitcode == 0, log.read_text()
        else:
            shortest *= 0.9  # the machine was busy when it was measured
    finish(file, log)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert {path.split("/")[1] for path in results(tmp_path / "whole")} >= {"pattern.yaml", "metrics.json", "eval.json"}


def test_the_run_files_of_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("indexcache_search.searching.begin.show_data", lambda job: ran.append(job.run))
    monkeypatch.setattr("indexcache_search.eval.run.run", lambda job: ran.append(job.candidates))
    page = Path(__file__).parents[2] / "docs" / "rented-node.md"
    files = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(text)
        done = CliRunner().invoke(search_app, ["--config", str(tmp_path / f"{number}.yaml"), "--dry-run"])
        assert done.exit_code == 0, done.output
    assert [runtime.engine for runtime in ran] == ["sglang"] * len(files) and len(files) == 2
    assert ran[0].server_arguments == ("--tp", "8") and "dsa" in ran[1].server_arguments
    assert CliRunner().invoke(eval_app, ["--config", str(tmp_path / "0.yaml")]).exit_code == 0
    assert len(ran[2].endpoints) == 2


@pytest.mark.parametrize("app", [search_app, eval_app], ids=["search", "eval"])
def test_a_key_outside_of_the_sections_is_for_every_command(app: Any, tmp_path: Path) -> None:
    for text, line in (
        ("seq_lne: {a: 1}", "run.yaml: seq_lne: "),
        ("search: [1]", "run.yaml: search: expected a mapping of option names"),
        ("eval:", "run.yaml: eval: expected a mapping of option names"),
        ("seq_len: 32\nsearch: {seq_len: 64}\neval: {seq_len: 64}", "seq_len stands outside of the section, too"),
        ("search: {sed: 1}\neval: {sed: 1}", "no such option"),
    ):
        (tmp_path / "run.yaml").write_text(text)
        done = CliRunner().invoke(app, ["--config", str(tmp_path / "run.yaml"), "--dry-run"])
        assert done.exit_code == 2 and line in " ".join(done.output.split()), done.output


def test_what_another_command_reads_is_nobody_elses(tmp_path: Path, token_file: Path, model_folder: Path) -> None:
    file = run_file(model_folder, token_file, tmp_path / "out")
    file.write_text(file.read_text().replace("strategy: greedy", "strategie: greedy"))
    done = CliRunner().invoke(search_app, ["--config", str(file), "--dry-run"])
    assert done.exit_code == 2 and "no such option: --strategie" in done.output
    done = CliRunner().invoke(eval_app, ["--config", str(file), "--dry-run"])
    assert done.exit_code == 2 and done.output.endswith("search/pattern.yaml: No such file or directory\n")


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_run_files_end_in_one_line_each(
    tmp_path: Path, model_folder: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Or are as good as the right one, and then name what is to be run; nothing runs here."""
    ran: list[bool] = []
    monkeypatch.setattr("indexcache_search.searching.begin.show_data", lambda *given: ran.append(True))
    monkeypatch.setattr("indexcache_search.eval.run.run", lambda *given: ran.append(True))
    monkeypatch.chdir(tmp_path)
    file = run_file(model_folder, token_file, tmp_path / "out")
    right, draw = file.read_text(), random.Random(12)
    for number in range(count):
        app, name = ((search_app, "indexcache-search"), (eval_app, "indexcache-eval"))[number % 2]
        text = mutated(right, draw)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        ran.clear()
        done = CliRunner().invoke(app, ["--config", str(file), "--dry-run"])
        lines = [line for line in done.output.splitlines() if line]
        if ran or "--help" in text:
            assert done.exit_code == 0 and not lines, text
        else:
            assert done.exit_code == 2 and len(lines) == 1, (text, done.output)
            assert lines[0].startswith(f"{name}: ") and lines[0].isprintable(), text
