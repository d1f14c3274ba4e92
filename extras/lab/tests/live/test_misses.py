"""Counting on a live calibration server what buffers of SGLang's HiSparse would miss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("sglang")

from indexcache_lab.offload import cli
from indexcache_lab.offload.counted import misses_on
from indexcache_lab.offload.lru_buffer import hisparse_misses
from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.transformers import TransformersEngine
from tests.live.calibrating import LENGTH, PATTERNS, live_engine
from tests.live.server import Server
from tests.live.test_calibration import data, reference, server

__all__ = ["data", "reference", "server"]
pytestmark = pytest.mark.sglang


def test_misses_are_what_they_are_on_transformers(
    server: Server, reference: TransformersEngine, data: TokenSet, tmp_path: Path
) -> None:
    """Of decode steps in two chunks; then by the command line, with and without the server."""
    engine, steps, sizes = live_engine(server), 100, [64, 96, 128, 192]
    for pattern in (PATTERNS[0], PATTERNS[3]):
        for row in range(data.num_sequences):
            selected = reference.selections(pattern, data, row, steps)
            found = misses_on(engine, pattern, data, row, steps=steps, sizes=sizes)
            assert sorted(found) == list(pattern.full_layers)
            for layer, counts in found.items():
                rows = [(chosen, LENGTH - steps + 1 + at) for at, chosen in enumerate(selected[layer][0])]
                wanted = [sum(hisparse_misses(rows, size, LENGTH - steps)) for size in sizes]
                assert counts == pytest.approx(wanted, rel=0.01, abs=3) and counts[-1] == 0 < counts[1] < counts[0]
    engine.close()
    options = ["--model", str(demo.MODEL), "--evaluation", "demo:text", "--seq-len", str(LENGTH), "--num-sequences",
               "2", "--decode-steps", str(steps), "--pattern", PATTERNS[3].letters, "--buffers", "1,2", "--server",
               "bandwidth=50,step_ms=5"]  # fmt: skip
    plans = []
    for name, where in (("live", ["--endpoint", server.url]), ("here", ["--device", "cpu"])):
        done = CliRunner().invoke(cli.app, [*options, *where, "--output", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        plans.append(json.loads((tmp_path / name / "offload.json").read_text())["plans"])
    for live, here in zip(*plans, strict=True):
        assert live["name"] == here["name"] and live["kl"]["mean"] == pytest.approx(here["kl"]["mean"], rel=0.01)
        for mine, other in zip(live["buffers"], here["buffers"], strict=True):
            assert mine["exposed"]["mean"] == pytest.approx(other["exposed"]["mean"], rel=0.01)
            assert mine["step_ms"] == pytest.approx(other["step_ms"], rel=0.01)
