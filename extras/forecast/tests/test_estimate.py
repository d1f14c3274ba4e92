"""indexcache-search --estimate: the beginning of a search says what all of it takes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_forecast.forecast import Forecast, forecast_of
from indexcache_forecast.forecaster import StandInForecaster
from indexcache_forecast.stand_in import Draft
from indexcache_search.cli.search import app
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.searching import forecasts
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.comparison import comparison_lines, evaluated
from scripts.bench.search.simulated import Structure
from sglang_indexcache import Pattern
from tests.search.clocked import ClockedEngine, settings_of
from tests.search.test_journal import EVALUATION
from tests.search.test_journal import journal as journal_in
from tests.search.test_search import arguments


@pytest.mark.parametrize(
    ("name", "layers", "seed"), [("lazy", 30, 1), ("lazy", 30, 2), ("lazy", 47, 3), ("greedy", 16, 4)]
)
def test_the_estimate_is_within_a_quarter_of_what_it_took(name: str, layers: int, seed: int, tmp_path: Path) -> None:
    engine, settings = ClockedEngine(layers, seed, Structure()), settings_of(name)
    calibration, held_out, goal = engine.tokens(32), engine.tokens(48, seed=1), settings.goal(engine.model)
    names = identity(engine, calibration, held_out, "nll")
    with Journal(tmp_path / "first", names, today()) as journal:
        begun = Begun(settings, goal, engine, calibration, held_out, journal)
        found = forecast_of(begun, seconds=60.0)
        assert found.done >= 60.0
    with Journal(tmp_path / "first", names, today()) as journal:  # the search goes on from there
        before = journal.path.read_bytes()
        begun = replace(begun, journal=journal)
        chooses, judges = begun.chooses(), begun.judges()
        result = begun.search(chooses).find()
        list(evaluated(comparison_lines(result, engine.model.native, {}), judges))
        assert journal.path.read_bytes().startswith(before)
    took = chooses.cost.seconds + judges.cost.seconds
    assert found.search + found.held_out == pytest.approx(took, rel=0.25)


class OnServer(ClockedEngine, SglangEngine):
    """A server that evaluates two patterns at once."""

    lanes = 2


def test_on_servers_no_patterns_by_similarity_are_compared(tmp_path: Path) -> None:
    """Servers don't measure it: of each retention the pattern found and the uniform one are compared."""
    engine, settings = OnServer(16, 6, Structure()), settings_of("lazy")
    calibration, held_out, goal = engine.tokens(8), engine.tokens(4, seed=1), settings.goal(engine.model)
    with Journal(tmp_path, identity(engine, calibration, held_out, "nll"), today()) as journal:
        begun = Begun(settings, goal, engine, calibration, held_out, journal)
        found = forecast_of(begun, seconds=10.0)
    assert found.runs[1] == (1 + 2 + 2) * 4
    assert 10.0 <= found.done < 11.0 and found.prompts > 0 and found.left == found.seconds - found.done


def test_a_beginning_of_one_evaluation_is_enough(tmp_path: Path) -> None:
    """On a large model a minute runs the model's own pattern, and little else."""
    engine, settings = ClockedEngine(30, 5, Structure()), settings_of("lazy")
    calibration, held_out, goal = engine.tokens(8), engine.tokens(8, seed=1), settings.goal(engine.model)
    names = identity(engine, calibration, held_out, "nll")
    with Journal(tmp_path, names, today()) as journal:
        begun = Begun(settings, goal, engine, calibration, held_out, journal)
        found = forecast_of(begun, seconds=0.0)
    assert found.runs[0] > 8 and found.seconds > found.done > 0


def test_an_estimate_as_text() -> None:
    found = Forecast(
        loading=600,
        search=7200,
        held_out=3000,
        matrices=60,
        prompts=0,
        done=64,
        runs=(1116, 432),
        model_bytes=700 * 10**9,
        journal_bytes=200_000,
        memory_bytes=4 * 10**9,
        gpu_bytes=0,
    )
    assert found.as_text(98.32).splitlines() == [
        "loading       0:10:00",
        "search        2:00:00  1116 runs of a sequence",
        "held out      0:50:00  432 runs of a sequence",
        "matrices      0:01:00",
        "in all        3:01:00  of which 0:01:04 of evaluations are done",
        "left          2:59:56  loading once more included",
        "disk        700.0 GB model, 0.2 MB journal",
        "memory      4.0 GB",
        "cost        296.60 at 98.32 an hour",
    ]
    assert "cost" not in found.as_text(None)
    assert "model, 20.5 kB journal" in replace(found, journal_bytes=20_480).as_text(None)
    assert "GPU 70.0 GB" in replace(found, gpu_bytes=70 * 10**9).as_text(None)


def test_the_command_estimates_and_the_search_goes_on(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    given = arguments(model_folder, token_file, tmp_path / "out")
    done = CliRunner().invoke(app, [*given, "--estimate", "--hourly-price", "36"])
    assert done.exit_code == 0, done.output
    assert re.search(r"^cost +\d+\.\d\d at 36 an hour$", done.output, re.MULTILINE)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != "indexcache-run.json"] == ["work"]
    journal = (tmp_path / "out" / "work" / "journal.jsonl").read_bytes()
    assert CliRunner().invoke(app, given).exit_code == 0
    assert (tmp_path / "out" / "work" / "journal.jsonl").read_bytes().startswith(journal)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["cost"]["evaluations"] > 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--hourly-price", "36"], "--hourly-price needs --estimate"),
        (["--estimate", "--dry-run"], "--estimate needs a run without --dry-run"),
        (["--estimate", "--hourly-price", "-1"], "found -1, expected 0 to 1000000"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], line: str) -> None:
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 2 and line in " ".join(done.output.split())


def test_a_draft_goes_its_own_way_and_writes_nothing(tmp_path: Path) -> None:
    other = replace(EVALUATION, pattern=Pattern("FSS"))
    with journal_in(tmp_path) as first:
        first.add_evaluation("calibration", EVALUATION)
        before, draft = first.path.read_bytes(), Draft(first)
        draft.add_evaluation("calibration", other)
        first.add_evaluation("held-out", EVALUATION)
        assert draft.known("calibration") == [EVALUATION, other] and draft.known("held-out") == []
        assert first.known("calibration") == [EVALUATION] and (first.records, draft.records) == (2, 2)
        assert first.path.read_bytes().startswith(before) and b"FSS" not in first.path.read_bytes()


def test_without_a_forecaster_the_time_left_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert isinstance(forecasts._forecaster(), StandInForecaster)
    monkeypatch.setattr(forecasts, "first_made", lambda group, kind: None)
    done = CliRunner().invoke(app, ["--estimate", "--output", str(tmp_path / "out")])
    assert done.exit_code == 2 and "--estimate needs an extension that is not installed" in done.output
    begun: Any = None
    assert str(forecasts.time_left(begun)) == "running for 0:00:00, time left not known"
    assert forecasts.time_left(begun).share is None and not (tmp_path / "out").exists()
