"""Traffic for real servers: all requests answered, prefixes in the cache, goodput as SGLang's bench_serving has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from scripts.bench.serving import traffic
from scripts.bench.serving.goodput import Bound, Limits, summary
from scripts.bench.serving.replay import Outcome
from scripts.tools import random_models
from scripts.tools.inprocess import ARGUMENTS, own_arguments
from tests.live.server import environment

pytestmark = pytest.mark.sglang


@pytest.mark.slow
def test_agents_and_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's server has proven its pattern, or the script had named it as lost."""
    model = random_models.build("glm-dense", tmp_path / "glm")
    engine = {**ARGUMENTS, **own_arguments(model), "skip_tokenizer_init": True, "sleep_on_idle": True}
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {
        "--model": model,
        "--engine": json.dumps(engine),
        "--rates": "2",
        "--requests": "4",
        "--lengths": "40:200",
        "--median": "80",
        "--sessions": "2",
        "--turns": "2",
        "--prefix": "640",
        "--new": "40:80",
        "--output-tokens": "4:8",
        "--think": "0.1",
        "--ttft": "100s",
        "--tpot": "100s",
        "--rounds": "1",
        "--vocabulary": random_models.VOCAB,
        "--output": tmp_path / "out.json",
    }
    arguments = [str(item) for pair in given.items() for item in pair]
    monkeypatch.setattr(sys, "argv", ["traffic", *arguments, "plain", "shared=FSSFSS"])
    code = traffic.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert (code, found["lost"]) == (0, {})
    rows = {(row["workload"], row["server"]): row for row in found["rows"]}
    assert len(rows) == 4 and all(row["failed"] == 0 and row["met"] == 1 for row in rows.values())
    for server in ("plain", "shared"):
        assert rows["mixture", server]["requests"] == rows["agentic", server]["requests"] == 4
        assert rows["mixture", server]["cached"] < 0.05 and rows["agentic", server]["cached"] > 0.8


def test_goodput_is_that_of_bench_serving() -> None:
    from sglang.benchmark.goodput import calculate_goodput

    found = [
        Outcome(0, 10, 10, first=1.0, latency=2.0, later=100, output=101),
        Outcome(0, 10, 10, first=3.0, latency=4.0, later=100, output=101),
        Outcome(0, 10, 10, first=1.0, latency=9.0, later=100, output=101),
        Outcome(0, 10, 10, first=1.0, latency=1.0, output=1),
        Outcome(0, 10, 10, error="503"),
    ]
    theirs = calculate_goodput(
        [
            SimpleNamespace(success=item.error is None, ttft=item.first, latency=item.latency, output_len=item.output)
            for item in found
        ],
        {"ttft": 2000, "tpot": 20},
        10.0,
    )
    ours = summary([(found, 10.0)], Limits(Bound.parse("2s"), Bound.parse("20ms"), None))
    assert (ours["goodput"], ours["met"]) == (theirs.request_goodput, theirs.slo_attainment) == (0.2, 0.4)
    assert {"ttft": ours["met_ttft"], "tpot": ours["met_tpot"]} == theirs.slo_attainment_by_metric
