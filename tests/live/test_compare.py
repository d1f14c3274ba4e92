"""indexcache-eval against two real servers, one of which serves a pattern."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.cli.evaluate import app
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from tests.live.server import running

PLAIN = (sys.executable, "-m", "sglang.launch_server")
pytestmark = pytest.mark.sglang
PATTERN = Pattern("FSSFSSFSFSSSSSSS")
DATA = [
    "--evaluation",
    "demo:text",
    "--evaluation",
    "demo:copy",
    "--num-sequences",
    "4",
    "--tasks",
    "multi_key:samples=2",
]


def test_two_servers_are_compared_as_transformers_compares_their_patterns(tmp_path: Path) -> None:
    file = write_pattern(PATTERN, demo.MODEL, tmp_path / "pattern.yaml")
    cores = [{"SGLANG_CPU_OMP_THREADS_BIND": core} for core in "01"]
    with (
        running(demo.MODEL, tmp_path / "log-a", launcher=PLAIN, **cores[0]) as baseline,
        running(demo.MODEL, tmp_path / "log-b", "--indexcache-pattern", file, **cores[1]) as shared,
    ):
        urls = ["--endpoint", baseline.url, "--endpoint", f"{shared.url}/v1"]
        options = [*urls, *DATA, "--output", str(tmp_path / "served")]
        served = CliRunner().invoke(app, options)
    assert served.exit_code == 0, served.output
    named = ["--pattern", f"shared={PATTERN}", "--no-uniform", "--device", "cpu"]
    plain = CliRunner().invoke(app, [*named, *DATA, "--output", str(tmp_path / "plain")])
    assert plain.exit_code == 0, plain.output
    on_servers, here = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("served", "plain"))
    assert on_servers["held_out"]["sha256"] == here["held_out"]["sha256"]
    assert len(on_servers["held_out"]["rows"]) == len(here["held_out"]["rows"]) == 2
    for one, other in zip(on_servers["held_out"]["rows"], here["held_out"]["rows"], strict=True):
        for source in ("demo:text", "demo:copy"):
            losses = [row["by_source"][source]["loss"]["mean"] for row in (one, other)]
            assert losses[0] == pytest.approx(losses[1], abs=2e-3), source
            hits = [row["by_source"][source]["accuracy"]["mean"] for row in (one, other)]
            assert hits[0] == pytest.approx(hits[1], abs=0.01), source
        assert 0.0 <= one["by_source"]["multi_key-style"]["generated"]["mean"] <= 1.0
    assert on_servers["held_out"]["rows"][1]["increase"]["mean"] > 0.01
