"""Searching on a live engine: switching is exact and reversible, refused where it could not be, and finds the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from indexcache_search.engines.calibration_server import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.strategies.greedy import greedy
from indexcache_search.tokens import TokenSet
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.checkpoint import Checkpoint
from tests.live import models
from tests.live.server import FLAGS, Server, command, ended, environment, running
from tests.patterns import write_pattern

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CALIBRATE = ("--indexcache-calibrate", "--skip-tokenizer-init", "--sleep-on-idle")  # two cores, several servers
PLAIN = (sys.executable, "-m", "sglang.launch_server")
ENGINES_DIFFER = 1e-4  # nats a token; 3e-6 is seen
LENGTHS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build("glm-dense", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def data() -> TokenSet:
    tokens = np.random.default_rng(0).integers(2, models.VOCAB, (3, LENGTHS)).astype(np.int32)
    scored = np.broadcast_to(np.arange(LENGTHS) > models.TOPK, tokens.shape).copy()
    return TokenSet(tokens, scored, np.zeros(3, dtype=np.int64), ("random",))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(model, tmp_path_factory.mktemp("server") / "log", *CALIBRATE) as started:
        yield started


def live_engine(model: Path, *servers: Server) -> SglangEngine:
    description = Checkpoint.read(str(model)).model
    return SglangEngine([CalibrationServer(one.url) for one in servers], description, patience=60)


def trajectory(engine: Any, data: TokenSet) -> list[tuple[int, dict[int, float]]]:
    """Greedy's flips down to one F layer, with the loss per token of every candidate."""

    def losses(patterns: list[Pattern]) -> list[float]:
        found = {item.pattern: sum(item.losses) / sum(item.tokens) for item in engine.evaluate(patterns, data, "nll")}
        return [found[pattern] for pattern in patterns]

    return [(step.layer, dict(step.losses)) for step in greedy(engine.model.native, 1, losses)]


def test_the_search_finds_what_it_finds_on_transformers(model: Path, server: Server, data: TokenSet) -> None:
    live = trajectory(live_engine(model, server), data)
    reference = trajectory(TransformersEngine.load(str(model), "cpu"), data)
    for (layer, losses), (expected, expected_losses) in zip(live, reference, strict=True):
        assert losses.keys() == expected_losses.keys()
        worst = max(abs(losses[key] - expected_losses[key]) for key in losses)
        assert worst <= ENGINES_DIFFER
        assert layer == expected or abs(expected_losses[layer] - expected_losses[expected]) <= 2 * worst
    print(f"largest difference of the engines: {worst:.1e} nats a token")


def test_switching_away_and_back_returns_the_loss_bit_for_bit(model: Path, server: Server, data: TokenSet) -> None:
    engine = live_engine(model, server)
    patterns = [Pattern("FFFFFF"), Pattern("FSSSSS"), Pattern("FFFFFF"), Pattern("FSFSFS"), Pattern("FSSSSS")]
    found = [next(engine.evaluate([pattern], data, "nll")).losses for pattern in patterns]
    assert found[0] == found[2] and found[1] == found[4]
    assert len({found[0], found[1], found[3]}) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"pattern": "FFF"}, "pattern has 3 letters, model has 6 DSA layers"),
        ({"pattern": "SFFFFF"}, "begins with S"),
        ({}, "pattern is NoneType, expected a string"),
    ],
)
def test_patterns_that_do_not_fit_change_nothing(server: Server, body: dict[str, Any], message: str) -> None:
    calibration = CalibrationServer(server.url)
    before = calibration.status()["pattern"]
    with pytest.raises(SearchError, match=message):
        calibration._post("/indexcache/switch", body)
    assert calibration.status()["pattern"] == before


def test_a_serving_server_does_not_switch(model: Path, tmp_path: Path) -> None:
    file = write_pattern(Pattern("FSSSSF"), model, tmp_path / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--skip-tokenizer-init")
    with (
        running(model, tmp_path / "log", *flags) as serving,
        pytest.raises(SearchError, match="not in calibration mode"),
    ):
        CalibrationServer(serving.url).switch(Pattern("FFFFFF"))


def test_two_servers_and_one_that_dies(model: Path, server: Server, data: TokenSet, tmp_path: Path) -> None:
    """Whatever the dead one was working on is evaluated by the other, to the same losses."""
    patterns = [Pattern.full(6, {one, two}) for one in range(1, 6) for two in range(1, 6)]
    patterns = list(dict.fromkeys(patterns))
    expected = {item.pattern: item.losses for item in live_engine(model, server).evaluate(patterns, data, "nll")}
    with running(model, tmp_path / "log", *CALIBRATE) as second:
        engine = live_engine(model, server, second)
        scheduler = CalibrationServer(second.url).status()["process"]
        found = {}
        for item in engine.evaluate(patterns, data, "nll"):
            found[item.pattern] = item.losses
            if len(found) == 3:
                os.kill(scheduler, signal.SIGKILL)  # SGLang ends the whole server then
    assert found == expected


def test_the_command_line_with_a_server_of_its_own(model: Path, tmp_path: Path) -> None:
    """Unknown options go to the server; what can't be measured there is left out of the report."""
    rows = np.random.default_rng(1).integers(2, models.VOCAB, (8, LENGTHS)).tolist()
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    arguments = [sys.executable, "-m", "indexcache_search", "--engine", "sglang", "--model", str(model)]
    arguments += ["--calibration", str(tmp_path / "tokens.jsonl"), "--seq-len", str(LENGTHS), "--num-sequences", "2"]
    arguments += ["--num-eval-sequences", "2", "--retain", "1/2", "--output", str(tmp_path / "out"), *FLAGS]
    result = subprocess.run(
        [*arguments, "--skip-tokenizer-init"], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml")
    assert file.as_pattern().retention == 0.5 and file.versions["engine"] == "sglang 0.5.23"
    report = (tmp_path / "out" / "report.html").read_text()
    assert "Patterns found" in report and "Index overlap" not in report
    log = (tmp_path / "out" / "work" / "server.log").read_text()
    assert "indexcache: serving FFFFFF" in log

    result = subprocess.run(
        [*arguments, "--tp-size", "none", "--restart"], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2 and "SGLang ended with exit code 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_admin_key_is_asked_for(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(
        model,
        tmp_path / "log",
        *CALIBRATE,
        "--tp-size",
        "2",
        "--admin-api-key",
        "secret",
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    ) as locked:
        monkeypatch.setenv("SGLANG_API_KEY", "wrong")
        with pytest.raises(SearchError, match="refuses the key"):
            CalibrationServer(locked.url).status()
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
        calibration = CalibrationServer(locked.url)
        calibration.switch(Pattern("FSSSSS"))
        assert calibration.status()["versions"]["ranks"] == "2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "calibration needs --disable-radix-cache: without it, later chunks of a prompt read KV of an earlier"),
        (("--disable-radix-cache",), "calibration needs --enable-fp32-lm-head"),
        (
            ("--disable-radix-cache", "--enable-fp32-lm-head", "--enable-hierarchical-cache"),
            "--enable-hierarchical-cache can't be combined with calibration",
        ),
        (
            ("--disable-radix-cache", "--enable-fp32-lm-head", "--host", "0.0.0.0"),
            "calibration on --host 0.0.0.0 needs --admin-api-key",
        ),
    ],
)
def test_command_lines_that_calibration_refuses(model: Path, flags: tuple[str, ...], message: str) -> None:
    arguments = command(model, "--skip-tokenizer-init", *flags, launcher=PLAIN)
    code, lines = ended(arguments, SGLANG_INDEXCACHE_CALIBRATE="1")
    assert code == 2 and len(lines) == 1 and message in lines[0]
