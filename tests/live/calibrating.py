"""A calibration server of the demo model, its data, and engines that use it one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from indexcache_search import demo
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_server import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.hf.loading import describe_model, load_tokenizer
from sglang_indexcache import Pattern
from tests.live.server import Server

MODEL = describe_model(str(demo.MODEL))
CHUNK, LENGTH = 64, 192
CALIBRATE = ("--indexcache-calibrate", "--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK))
PATTERNS = [Pattern("F" * 16), Pattern("FS" * 8), Pattern("F" + "S" * 15), Pattern("FSSS" * 4)]
_engines: list[SglangEngine] = []


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
