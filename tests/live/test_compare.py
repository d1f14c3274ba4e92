"""indexcache-eval against two real servers, one of which serves a pattern."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sglang")

from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.cli.evaluate import app
from indexcache_search.errors import SearchError
from indexcache_search.results.variant import NAMED, Variant
from indexcache_speed.servers import check
from indexcache_speed.timed_request import send
from indexcache_speed.turns import Load, Timed, measured
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from sglang_indexcache.http.address import Address
from tests.live.server import running
from tests.live.test_server import states

PLAIN = (sys.executable, "-m", "sglang.launch_server")
pytestmark = pytest.mark.sglang
SPEED = ["--speed", "96,480:output_tokens=4", "--concurrency", "2"]
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
        options = [*urls, *DATA, *SPEED, "--output", str(tmp_path / "served")]
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
    speed = [(row["name"], row["context"], row["concurrency"], row["turns"]) for row in on_servers["speed"]]
    names = ["baseline", on_servers["held_out"]["rows"][1]["name"]]
    assert speed == [(name, context, number, 5) for context in (96, 480) for number in (1, 2) for name in names]
    for row in on_servers["speed"]:
        assert 0 < row["first_token_ms"]["low"] <= row["first_token_ms"]["median"] and row["token_ms"]["low"] > 0
    assert "speed" not in here


def test_a_server_without_a_pattern(tmp_path: Path) -> None:
    """It has nothing of ours; speed needs no tokenizer, and a prompt that was sent before is none to be timed."""
    file = write_pattern(PATTERN, demo.MODEL, tmp_path / "pattern.yaml")
    with running(demo.MODEL, tmp_path / "log", "--skip-tokenizer-init", launcher=PLAIN) as server:
        assert states(server) == [None]
        assert check_main([file, "--server", server.url]) == 1
        address, prompt = Address.of(server.url), list(range(10, 330))
        load = Load(context=320, concurrency=2, output_tokens=6, turns=5)
        check([address], [load])
        with pytest.raises(SearchError, match="has room for"):
            check([address], [Load(context=4096, output_tokens=6, turns=5)])
        lines = [Variant.baseline(None), Variant(NAMED, "again", None, None)]
        items = [Timed(line, partial(send, address)) for line in lines]
        rows = measured(items, load, np.arange(10, 400, dtype=np.int32), "")
        assert [row.name for row in rows] == ["baseline", "again"]
        [timing] = send(address, [prompt], 6).timings
        assert 0 < timing.first < timing.last and timing.later == 5
        with pytest.raises(SearchError, match="of a new prompt from its cache"):
            send(address, [prompt], 6)
