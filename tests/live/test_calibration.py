"""Searching on a live engine: switching is exact and reversible, refused where it could not be, and finds the same."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.answers import Rank
from indexcache_search.engines.calibration_client import CalibrationServer, ServerBusyError
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.strategies.greedy import greedy
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.io.messages import BEGINS_SHARED, BUSY, OTHER_LENGTH
from sglang_indexcache.io.refusal import ADMIN_KEY_VARIABLE
from tests.live.calibrating import (
    CALIBRATE,
    CHUNK,
    LENGTH,
    MODEL,
    PATTERNS,
    close_engines,
    finished,
    given_back,
    live_engine,
    losses,
    search,
    sequences,
    server,
    single,
    wait_for_evaluations,
)
from tests.live.server import FLAGS, Server, command, ended, environment, running, start

__all__ = ["given_back", "server", "single"]
pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("given_back")]

CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # of the ranks of a replica; all replicas take the same ones
PLAIN = (sys.executable, "-m", "sglang.launch_server")
ENGINES_DIFFER = 1e-4  # nats a token
OWN = (*FLAGS, "--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK))  # of a server that a search starts
FULL_UNTIL = 14  # F layers that the trajectories end with: 29 evaluations


@pytest.fixture(scope="module")
def data() -> TokenSet:
    return sequences(2)


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return TransformersEngine.load(str(demo.MODEL), "cpu")


def trajectory(engine: Any, data: TokenSet) -> list[tuple[int, dict[int, float]]]:
    """Greedy's flips, with the loss per token of every candidate."""

    def evaluate(patterns: list[Pattern]) -> list[float]:
        found = {item.pattern: sum(item.losses) / sum(item.tokens) for item in engine.evaluate(patterns, data, "nll")}
        return [found[pattern] for pattern in patterns]

    return [(step.layer, dict(step.losses)) for step in greedy(MODEL.native, FULL_UNTIL, evaluate)]


@pytest.fixture(scope="module")
def expected(reference: TransformersEngine, single: TokenSet) -> list[tuple[int, dict[int, float]]]:
    return trajectory(reference, single)


def check_trajectory(engine: SglangEngine, data: TokenSet, expected: list[tuple[int, dict[int, float]]]) -> None:
    """The same flips, unless two candidates are nearer to each other than the engines are."""
    worst = 0.0
    for (layer, found), (expected_layer, wanted) in zip(trajectory(engine, data), expected, strict=True):
        assert found.keys() == wanted.keys()
        worst = max(worst, *(abs(found[key] - wanted[key]) for key in found))
        assert worst <= ENGINES_DIFFER
        assert layer == expected_layer or abs(wanted[layer] - wanted[expected_layer]) <= 2 * worst
        if layer != expected_layer:
            break  # from here on they search other patterns
    print(
        f"{len(engine._lanes)} lane(s), {engine.settings['ranks']} rank(s): engines differ by {worst:.1e} nats a token"
    )


def check_switching_back(engine: SglangEngine, data: TokenSet) -> None:
    baseline, shared = PATTERNS[0], PATTERNS[2]
    found = [
        next(iter(engine.evaluate([pattern], data, "nll"))).losses
        for pattern in (baseline, shared, baseline, PATTERNS[1], shared)
    ]
    assert found[0] == found[2] and found[1] == found[4]
    assert len(set(found)) == 3


def test_the_search_finds_what_it_finds_on_transformers(
    server: Server, data: TokenSet, single: TokenSet, expected: list[tuple[int, dict[int, float]]]
) -> None:
    engine = live_engine(server)
    check_trajectory(engine, single, expected)
    check_switching_back(engine, data)


def test_kl_and_overlap_are_what_they_are_on_transformers(
    server: Server, reference: TransformersEngine, data: TokenSet
) -> None:
    """With holes in what is scored; the baseline's own divergence is exactly 0."""
    scored = data.scored.copy()
    scored[0, 100:110] = False
    data, engine = dataclasses.replace(data, scored=scored), live_engine(server)
    found, wanted = losses(engine, data, "kl"), losses(reference, data, "kl")
    assert found[PATTERNS[0]] == (0.0, 0.0)
    for pattern in PATTERNS[1:]:
        assert found[pattern] == pytest.approx(wanted[pattern], rel=1e-3) and min(found[pattern]) > 0.01
    overlap = engine.matrix("overlap", data, 16)
    assert overlap is not None and np.abs(overlap - reference.matrix("overlap", data, 16)).max() <= 1 / 64


def test_sending_ahead_changes_nothing(server: Server, data: TokenSet) -> None:
    """Sequences of whole chunks never share a pass, so losses are the same bit for bit."""
    engine = live_engine(server)
    assert engine._chunk == CHUNK
    ahead = losses(engine, data)
    engine._chunk = 0
    assert losses(engine, data) == ahead


@pytest.mark.parametrize(
    ("flags", "lanes", "ranks"),
    [
        (("--tp-size", "2", "--admin-api-key", "secret"), 1, "2"),
        pytest.param(("--dp-size", "2"), 2, "1", marks=pytest.mark.slow),
    ],
    ids=["tp", "dp"],
)
def test_ranks_search_alike(
    flags: tuple[str, ...],
    lanes: int,
    ranks: str,
    single: TokenSet,
    expected: list[tuple[int, dict[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = {CORES: "0|1" if lanes == 1 else "0-1|0-1"}
    with running(demo.MODEL, tmp_path / "log", *CALIBRATE, *flags, **cores) as started:
        if "--admin-api-key" in flags:
            monkeypatch.setenv("SGLANG_API_KEY", "wrong")
            with pytest.raises(SearchError, match="refuses the key"):
                CalibrationServer(started.url).switch(PATTERNS[1])
            monkeypatch.setenv("SGLANG_API_KEY", "secret")
        engine = live_engine(started)
        assert len(engine._lanes) == lanes and engine.settings["ranks"] == ranks
        check_trajectory(engine, single, expected)
        check_switching_back(engine, single)
        if lanes > 1:
            patterns = [rank.pattern for rank in CalibrationServer(started.url).control("status", Rank)]
            assert len(set(patterns)) == 2  # one each


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--pp-size", "2"),
        (
            *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"),
            *("--chunked-prefill-size", str(2 * CHUNK)),  # which SGLang divides among them
        ),
    ],
    ids=["pp", "dp-attention"],
)
def test_other_ways_to_spread_a_model(
    flags: tuple[str, ...], reference: TransformersEngine, single: TokenSet, tmp_path: Path
) -> None:
    """Pipeline stages switch together and measure no kl; ranks of data-parallel attention run patterns of their own."""
    with running(demo.MODEL, tmp_path / "log", *CALIBRATE, *flags, **{CORES: "0|1"}) as started:
        engine = live_engine(started)
        lanes = len(engine._lanes)
        cases: list[tuple[Objective, list[Pattern]]] = [("nll", PATTERNS[1:3]), ("kl", PATTERNS[1:2])]
        for objective, patterns in cases[:lanes]:
            found, wanted = (losses(one, single, objective, patterns) for one in (engine, reference))
            for pattern in patterns:
                assert found[pattern] == pytest.approx(wanted[pattern], rel=1e-3)
        if lanes == 1:
            assert engine.matrix("overlap", single, 4) is None
            with pytest.raises(SearchError, match="kl is not measured with pipeline stages"):
                losses(engine, single, "kl")
        assert lanes == (1 if "--pp-size" in flags else 2)


def test_the_trap_of_the_prefix_cache(server: Server, data: TokenSet, tmp_path: Path) -> None:
    """With the cache on, later chunks read KV that another pattern wrote. Calibration refuses to start so; forced, and
    without the flush of each switch, losses are wrong."""
    flags = [flag for flag in CALIBRATE if flag != "--indexcache-calibrate"]
    forced = {"SGLANG_INDEXCACHE_CALIBRATE": "1", "DSA_CPU_BREAK": "radix"}
    right = losses(live_engine(server), data)
    with running(demo.MODEL, tmp_path / "log", *flags, "--enable-fp32-lm-head", launcher=PLAIN, **forced) as trapped:
        wrong = losses(live_engine(trapped), data)
    assert wrong[PATTERNS[0]] == pytest.approx(right[PATTERNS[0]], abs=1e-3)  # nothing was cached yet
    errors = [np.abs(np.subtract(wrong[pattern], right[pattern])).max() for pattern in PATTERNS[1:]]
    print(f"with the prefix cache losses are wrong by {', '.join(f'{error:.2f}' for error in errors)} nats a sequence")
    assert min(errors) > 100 * ENGINES_DIFFER and max(errors) > 0.1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"pattern": "FFF"}, OTHER_LENGTH.format(3, 16)),
        ({"pattern": "S" + "F" * 15}, BEGINS_SHARED),
        ({}, "pattern is NoneType, expected a string"),
    ],
)
def test_patterns_that_do_not_fit_change_nothing(server: Server, body: dict[str, Any], message: str) -> None:
    calibration = CalibrationServer(server.url)
    before = calibration.status().pattern
    with pytest.raises(SearchError, match=message):
        calibration.control("switch", Rank, **body)
    assert calibration.status().pattern == before


def test_a_busy_server_does_not_switch_and_is_waited_for(server: Server) -> None:
    calibration = CalibrationServer(server.url)
    calibration.switch(PATTERNS[0])
    decoding = threading.Thread(target=server.generate, args=([[5] * 10], ["long"], 60, False))
    decoding.start()
    refused = ""
    while decoding.is_alive() and not refused:
        try:
            calibration.control("switch", Rank, pattern=PATTERNS[0].roles)
        except ServerBusyError as error:
            refused = str(error)
    assert f"busy: {BUSY}" in refused
    calibration.switch(PATTERNS[1])
    decoding.join()
    assert calibration.status().pattern == PATTERNS[1].roles


@pytest.mark.slow
def test_two_servers_and_kills_end_in_the_identical_file(
    server: Server, single: TokenSet, expected: list[tuple[int, dict[int, float]]], tmp_path: Path
) -> None:
    whole, resumed, shared = tmp_path / "whole", tmp_path / "resumed", tmp_path / "shared"
    finished(search(whole, "--endpoint", server.url), tmp_path / "said")
    wanted = (whole / "pattern.yaml").read_bytes()

    arguments = search(resumed, "--endpoint", server.url)
    process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL)
    wait_for_evaluations(resumed, 8, process)
    process.kill()
    process.wait()
    finished(arguments, tmp_path / "said")
    assert (resumed / "pattern.yaml").read_bytes() == wanted

    with running(demo.MODEL, tmp_path / "log", *CALIBRATE) as second:
        check_trajectory(live_engine(server, second), single, expected)
        close_engines()
        assert CalibrationServer(second.url).status().pattern != PATTERNS[0].roles  # it did its part
        arguments = search(shared, "--endpoint", server.url, "--endpoint", second.url)
        scheduler = CalibrationServer(second.url).status().process
        process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL)
        wait_for_evaluations(shared, 8, process)
        os.kill(scheduler, signal.SIGKILL)  # SGLang ends the whole server then
        assert process.wait(900) == 0
    assert (shared / "pattern.yaml").read_bytes() == wanted


def test_a_search_with_a_server_of_its_own(tmp_path: Path) -> None:
    """Unknown options go to the server, which ends with the search."""
    process = start(search(tmp_path / "out", *OWN, objective="kl"), tmp_path / "said")
    wait_for_evaluations(tmp_path / "out", 1, process)
    log = (tmp_path / "out" / "work" / "server.log").read_text()
    port = int(re.findall(r"running on http://127\.0\.0\.1:(\d+)", log)[0])
    assert stat.S_IMODE((tmp_path / "out" / "work" / "server.log").stat().st_mode) == 0o600
    with pytest.raises(SearchError, match="refuses the key"):  # others on this machine can't switch its patterns
        CalibrationServer(f"http://127.0.0.1:{port}").switch(PATTERNS[1])
    lines = {path: path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")}
    ours = [path for path, line in lines.items() if str(port) in line]
    assert not any("--admin-api-key" in lines[path] for path in ours)
    held = "".join(path.with_name("environ").read_text(errors="replace") for path in ours)
    [key] = set(re.findall(f"{ADMIN_KEY_VARIABLE}=([^\0]+)", held))
    assert "admin_api_key" in log and key not in log and not any(key in line for line in lines.values())
    assert process.wait(900) == 0
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml")
    assert file.as_pattern().retention == 7 / 8 and file.versions["engine"] == "sglang 0.5.23"
    report = (tmp_path / "out" / "report.html").read_text()
    assert "Loss beside speed" in report and "Overlap of choices" in report
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["overlap"] is not None
    speed = [(row["name"], row["retention"], row["context"], row["source"]) for row in metrics["speed"]]
    assert speed == [("baseline", "1", LENGTH, "measured"), ("greedy", "7/8", LENGTH, "measured")]
    assert all(row["first_token_ms"]["low"] > 0 and row["token_ms"] is None for row in metrics["speed"])
    log = (tmp_path / "out" / "work" / "server.log").read_text()
    assert "indexcache: serving FFFF" in log


@pytest.mark.slow
def test_a_server_of_its_own_that_does_not_start_ends_a_search(tmp_path: Path) -> None:
    """As with the stand-ins of tests/core/test_secrets.py."""
    arguments = search(tmp_path / "out", *OWN, "--tp-size", "none")
    result = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=600)
    assert result.returncode == 2 and "SGLang ended with exit code 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_line_that_calibration_refuses() -> None:
    """Any launcher, one line; each flag is in tests/core/test_calibration_flags.py."""
    arguments = command(demo.MODEL, "--skip-tokenizer-init", "--disable-radix-cache", launcher=PLAIN)
    code, lines = ended(arguments, SGLANG_INDEXCACHE_CALIBRATE="1")
    assert code == 2 and len(lines) == 1 and "calibration needs --enable-fp32-lm-head" in lines[0]
