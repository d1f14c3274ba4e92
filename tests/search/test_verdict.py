"""What a comparison says of a pattern, and when a gate lets it pass: by what the sequences show, however few."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.cli.evaluate import app
from indexcache_search.eval.verdict import beyond, findings
from indexcache_search.evaluation.estimates import Estimate, over
from indexcache_search.results.schema import HeldOut, Row, SourceResult
from indexcache_search.results.variant import Kind


def rise(mean: float, stderr: float | None = 0.1, degrees: int = 1000) -> Estimate:
    return Estimate(mean, stderr, 0 if stderr is None else degrees)


def line(name: str, *rises: Estimate, kind: Kind = "named", accuracy: Estimate | None = None) -> Row:
    about = {"kind": kind, "name": name, "retention": None, "phase": None, "full_layers": None, "pattern": None}
    sources = {
        f"s{number}": SourceResult(loss=item, increase=item, accuracy=item, accuracy_change=accuracy)
        for number, item in enumerate(rises)
    }
    return Row(**about, loss=rises[0], increase=rises[0], by_source=sources)


def found(*rows: Row) -> list[str]:
    sources = list(rows[0].by_source)
    return findings(
        HeldOut(sources=sources, answer_sources=[], sequences=1, scored_tokens=1, sha256="", rows=list(rows))
    )


# -- what is said


def test_one_sequence_says_nothing() -> None:
    """A loss of 5 nats had no error, and passed as no worse on anything."""
    assert found(line("a", rise(5.0, None))) == ["a: not settled on s0: too few sequences to tell"]
    assert found(line("a", rise(-5.0, None), rise(0.0, 0.01))) == [
        "a: not settled on s0: too few sequences to tell; elsewhere not shown to be worse: the loss rises by at most"
        " 0.0200 (s1)"
    ]


def test_a_loss_that_is_no_number_is_not_a_lack_of_sequences() -> None:
    for broken in (rise(math.nan, math.nan), rise(math.inf, math.nan), rise(-math.inf, None)):
        assert found(line("a", broken)) == ["a: the loss is NaN or infinite on s0"]
        [both] = found(line("a", broken, rise(0.0, 0.01)))
        assert both.startswith("a: the loss is NaN or infinite on s0; elsewhere not shown to be worse: ")


def test_two_sequences_say_little() -> None:
    """By two standard errors (0.5 and 0.2) it would be worse; with one degree of freedom 14 are needed."""
    two = over(np.asarray([0.3, 0.7]))
    assert two.mean > 2 * (two.stderr or math.inf)
    assert found(line("a", two)) == ["a: not shown to be worse: the loss rises by at most 3.2935 (s0)"]
    assert found(line("a", over(np.asarray([0.3, 0.7] * 12)))) == ["a: worse on s0"]


def test_equal_rows_are_no_evidence() -> None:
    """Two sequences that lose the same have no spread, and seem to know it exactly."""
    assert "not settled on s0" in found(line("a", over(np.asarray([0.5, 0.5]))))[0]
    assert "not settled on s0" in found(line("a", over(np.asarray([-0.5, -0.5]))))[0]


def test_an_accuracy_that_falls_is_worse() -> None:
    assert found(line("a", rise(0.0), accuracy=rise(-0.3))) == ["a: worse on s0"]
    assert "not shown" in found(line("a", rise(0.0), accuracy=rise(-0.3, None)))[0]
    assert "not shown" in found(line("a", rise(0.0), accuracy=rise(-1.0, 0.0, 1)))[0]  # two samples


# -- the gate


@pytest.mark.parametrize("name", ["lazy", "uniform", "uniform4", "baseline-prod", "uniform phase 0", "baseline"])
def test_the_gate_looks_at_what_a_line_is_and_not_at_its_name(name: str) -> None:
    others = [line("baseline", rise(9.0), kind="baseline"), line("uniform phase 1", rise(9.0), kind="phase")]
    assert beyond([*others, line(name, rise(3.0))], 3.3) == []
    [said] = beyond([*others, line(name, rise(3.0))], 2.5)
    assert said.startswith(f"{name}: worse on s0 (+3.0000, +2.79")
    assert beyond(others, 100.0) == ["nothing was compared"]
    assert beyond([line("x", rise(math.nan))], 100.0) == ["x: the loss is NaN or infinite on s0"]


def test_what_is_not_shown_does_not_pass() -> None:
    rows = [line("a", rise(0.001, 0.001), rise(0.005, 0.004)), line("b", rise(0.0, 0.0))]
    assert beyond(rows, 0.02) == []
    assert beyond(rows, 0.01) == [
        "a: not settled on s1 (+0.0050, -0.0030 to +0.0130); more sequences would decide",
    ]
    assert beyond([line("a", rise(-0.5, None))], 1e6) == [
        "a: not settled on s0 (-0.5000, and too few sequences to say how far off that is); more sequences would decide"
    ]


def test_a_rise_beyond_the_limit_passes_one_time_in_forty_however_many_sources() -> None:
    """All sources have to pass, so nothing has to be corrected; six that are at the limit hardly ever do."""
    rng, passed = np.random.default_rng(21), {1: 0, 6: 0}
    for sources in passed:
        for _ in range(2_000):
            rises = [over(rng.normal(0.01, 0.02, 8)) for _ in range(sources)]
            passed[sources] += not beyond([line("a", *rises)], 0.01)
    assert passed[1] / 2_000 < 0.035 and passed[6] <= 2


def run(folder: Path, *more: str) -> Any:
    fixed = ["--model", str(demo.MODEL), "--evaluation", "demo:copy", "--seq-len", "128", "--no-uniform"]
    return CliRunner().invoke(app, [*fixed, "--output", str(folder), *more], env={"COLUMNS": "200"})


def test_a_gate_that_one_sequence_has_to_pass_is_closed(tmp_path: Path) -> None:
    more = ["--pattern", "a=FFFFFFFFFFFFFFSS", "--num-sequences", "1", "--max-increase", "1000"]
    done = run(tmp_path, *more)
    assert done.exit_code == 1, done.output
    assert "--max-increase 1000: a 7/8: not settled on demo:copy" in done.stderr and "no worse" not in done.output
