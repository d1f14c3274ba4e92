"""A calibration server of the demo model, its data, and engines that use it one after the other."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from indexcache_search import demo
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.hf.loading import describe_model, load_tokenizer
from sglang_indexcache import Pattern
from tests.live.server import Process, Server, kill_group, running, start

MODEL = describe_model(str(demo.MODEL))
CHUNK, LENGTH = 64, 192
CALIBRATE = ("--indexcache-calibrate", "--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK))
PATTERNS = [Pattern("F" * 16), Pattern("FS" * 8), Pattern("F" + "S" * 15), Pattern("FSSS" * 4)]
_engines: list[SglangEngine] = []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(demo.MODEL, tmp_path_factory.mktemp("server") / "log", *CALIBRATE) as started:
        yield started


@pytest.fixture(scope="module")
def single() -> TokenSet:
    """One sequence, for servers whose processes have to share two cores."""
    return sequences(1)


@pytest.fixture
def given_back() -> Iterator[None]:
    """A test that fails must not keep a server from the next one."""
    yield
    close_engines()


def sequences(number: int) -> TokenSet:
    """The first sequences of the demo's calibration data."""
    reader = TokenReader(lambda: load_tokenizer(str(demo.MODEL)), 4096, LENGTH)
    packer = Packer(reader, MODEL, LENGTH)
    packer.held_out(("demo:text",), 1)
    data = packer.collect(demo.CALIBRATION, 2, 0, "calibration")
    return dataclasses.replace(
        data, tokens=data.tokens[:number], scored=data.scored[:number], source_of=data.source_of[:number]
    )


def live_engine(*servers: Server, patience: float = 60) -> SglangEngine:
    """Return an engine; an earlier one gives its servers back."""
    close_engines()
    _engines.append(SglangEngine([CalibrationServer(one.url) for one in servers], MODEL, patience=patience))
    return _engines[-1]


def close_engines() -> None:
    """Give all servers back."""
    while _engines:
        _engines.pop().close()


def losses(
    engine: Any, data: TokenSet, objective: Objective = "nll", patterns: Sequence[Pattern] = PATTERNS
) -> dict[Pattern, tuple[float, ...]]:
    return {item.pattern: item.losses for item in engine.evaluate(patterns, data, objective)}


def search(folder: Path, *arguments: str, objective: str = "nll") -> list[str]:
    """A search on the command line: 29 evaluations."""
    return [
        *(sys.executable, "-m", "indexcache_search", "--engine", "sglang", "--objective", objective),
        *("--model", str(demo.MODEL), "--calibration", demo.CALIBRATION[1], "--seq-len", str(LENGTH)),
        *("--num-sequences", "1", "--num-eval-sequences", "1", "--retain", "7/8"),
        *("--strategy", "greedy"),
        *("--output", str(folder), *arguments),
    ]


def finished(arguments: list[str], log: Path) -> None:
    """Run a command that ends well; what it prints is in `log`."""
    process = start(arguments, log)
    try:
        assert process.wait(900) == 0, log.read_text()[-2000:]
    finally:
        kill_group(process)


def wait_for_evaluations(folder: Path, number: int, process: Process) -> None:
    journal = folder / "work" / "journal.jsonl"
    while process.poll() is None and (not journal.exists() or journal.read_text().count("\n") < number):
        time.sleep(0.05)
    assert process.poll() is None
