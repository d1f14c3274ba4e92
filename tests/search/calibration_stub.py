"""A calibration server of threads, whose losses are made up, and clients of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np

from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from sglang_indexcache import Pattern
from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.lease import Lease
from sglang_indexcache.calibration.preflight import CalibrationError
from sglang_indexcache.calibration.protocol import Measured
from sglang_indexcache.calibration.route import Route
from sglang_indexcache.families import describe
from tests.conftest import LAYERS, made_up, random_tokens, tiny_config
from tests.http_stub import Answering, HttpStub
from tests.search.streaming import tokens_of, write_events

MODEL = describe(tiny_config(), "tiny")
PATTERNS = [Pattern.full(LAYERS, {layer}) for layer in range(1, LAYERS)]
DATA = random_tokens()
VERSIONS = {"sglang": "0.5.23", "torch": "2.14.1", "dtype": "float32"}


def logprob(pattern: str, token: int, position: int) -> float:
    """Made up, and different for every pattern, token and position."""
    return -1.0 - (made_up(pattern, token, position) % 1000) / 1000


def divergence(pattern: str, ranges: list[list[int]]) -> tuple[float, float, int]:
    """Made up, and different for every pattern and set of positions."""
    rows = [row for first, last in ranges for row in range(first, last)]
    values = [(made_up(pattern, row) % 1000) / 1000 for row in rows]
    return sum(values), sum(value * value for value in values), len(values)


def scored(value: float = -1.0, shift: int = 0, last: int | None = None) -> dict[str, Any]:
    """An answer to the first sequence."""
    tokens = [int(token) + shift for token in DATA.tokens[0, 8:last]]
    own = [[value, token, None] for token in tokens]
    return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": [[entry] for entry in own]}}


STATUS = {
    "protocol": protocol.VERSION,
    "config_sha256": MODEL.config_sha256,
    "weights_sha256": "1" * 64,
    "versions": VERSIONS,
    "measures": [],
}


class Stub(HttpStub):
    """A calibration server of threads, with the route of real ones; `fail` decides what a request is answered with
    instead.

    Every data-parallel rank has a pattern of its own, and keeps baselines and divergences of its own.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.requests, self.lock, self.passed = 0, threading.Lock(), 0.0
        self.restart(ranks)
        self.config_sha256, self.versions, self.measures = MODEL.config_sha256, VERSIONS, ["kl", "overlap"]
        self.weights_sha256 = "1" * 64
        self.found: dict[str, str] = {}
        self.positions: list[int] = []
        self.sampled = 0
        self.asked: list[tuple[str, str | None]] = []
        self.timed: list[tuple[int | None, str, Any]] = []
        self.fail: Callable[[str], tuple[int, Any] | None] = lambda path: None
        stub = self

        class Handler(Answering):
            def get(self) -> None:
                code, answer = stub.read(self.path)
                self.reply(answer, code)

            def post(self, body: Any) -> None:
                stub.requests += 1
                stub.asked.append((self.path, self.headers.get("Authorization")))
                path = self.path.partition("?")[0]
                failed = stub.fail(path)
                code, answer = failed or ((200, None) if body.get("stream") else stub.answer(path, body))
                if path == "/generate" and body.get("stream") and code == 200:
                    stub.timed.append((body.get("routed_dp_rank"), "".join(stub.patterns), body))
                    write_events(self, tokens_of(body))
                    return
                if code == 0:  # the server is killed in mid-answer
                    self.connection.close()
                    return
                self.reply(answer, code)

        super().__init__(Handler)

    def restart(self, ranks: int) -> None:
        """Begin anew, as a server does that knows nothing of its clients."""
        self.patterns, self.switches = ["F" * LAYERS] * ranks, [0] * ranks
        self.boots, self.route = [uuid4().hex for _ in range(ranks)], Route(self.replies, Lease(self.clock))
        self.kept: list[set[int]] = [set() for _ in range(ranks)]
        self.data = [""] * ranks

    def clock(self) -> float:
        """Of leases; `passed` seconds went by at once."""
        return time.monotonic() + self.passed

    def read(self, path: str) -> tuple[int, Any]:
        """Answer GET."""
        states = [{"indexcache_calibration": True}] * len(self.patterns)
        return (200, {"internal_states": states}) if path == "/server_info" else (404, None)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/generate":
            return 200, self.generate(body)
        with self.lock:  # SGLang has one event loop
            return asyncio.run(self.route.answer(path.rpartition("/")[2], body))

    async def replies(self, body: dict[str, Any]) -> list[Any]:
        assert "token" not in body  # schedulers have no use for it
        answers = []
        for rank in range(len(self.patterns)):
            meant = body["dp_rank"] in (None, rank)
            try:
                found = self.control(body["action"], body, rank) if meant else {}
            except CalibrationError as error:
                return [SimpleNamespace(success=False, response=[], error=str(error))]
            answers.append({"dp_rank": rank, **found, **self.status(rank)})
        return [SimpleNamespace(success=True, response=[answer], error="") for answer in answers]

    def status(self, rank: int) -> dict[str, Any]:
        return {
            "protocol": protocol.VERSION,
            "boot": self.boots[rank],
            "switches": self.switches[rank],
            "pattern": self.patterns[rank],
            "fingerprint": Pattern(self.patterns[rank]).fingerprint,
            "config_sha256": self.config_sha256,
            "weights_sha256": self.weights_sha256,
            "versions": self.versions,
            "measures": self.measures,
        }

    def control(self, action: str, body: Any, rank: int) -> dict[str, Any]:
        match action:
            case "switch":
                self.patterns[rank] = body["pattern"]
                self.switches[rank] += 1
            case "baseline":
                if body["data"] != self.data[rank]:
                    self.kept[rank], self.data[rank] = set(), body["data"]
                return {"missing": sorted(set(range(len(body["ranges"]))) - self.kept[rank])}
            case "kl":
                if not set(body["requests"]) <= set(self.found):
                    raise CalibrationError(protocol.busy("another data set was announced meanwhile"))
                return {"sums": {rid: divergence(self.found.pop(rid), r) for rid, r in body["requests"].items()}}
            case "sample":
                self.positions, self.sampled = body["positions"], 0
            case "overlap":
                return {"overlap": np.eye(LAYERS).tolist(), "queries": self.sampled * len(self.positions)}
        return {}

    def generate(self, body: Any) -> Any:
        rank, start = body.get("routed_dp_rank") or 0, body["logprob_start_len"]
        for rid in body.get("rid", []):
            measured = Measured.parse(rid)
            assert measured is not None
            if measured.what == "keep":
                if (self.patterns[rank], measured.data) == (MODEL.native.roles, protocol.tag(self.data[rank])):
                    self.kept[rank].add(measured.sequence)
            elif measured.what == "overlap":
                self.sampled += 1
            elif measured.sequence in self.kept[rank] and measured.data == protocol.tag(self.data[rank]):
                self.found[rid] = self.patterns[rank]
        return [{"meta_info": self.scores(self.patterns[rank], tokens, start)} for tokens in body["input_ids"]]

    def scores(self, pattern: str, tokens: list[int], start: int) -> dict[str, Any]:
        own: list[Any] = [[None, tokens[start], None]]
        best: list[Any] = [None]
        for position in range(start + 1, len(tokens)):
            value = logprob(pattern, tokens[position], position)
            own.append([value, tokens[position], None])
            best.append([[value, tokens[position] if position % 2 else 0, None]])
        return {"input_token_logprobs": own, "input_top_logprobs": best}


def engine(*stubs: Stub, **options: Any) -> SglangEngine:
    return SglangEngine([CalibrationServer(stub.url) for stub in stubs], MODEL, **options)


def expected(pattern: Pattern) -> list[float]:
    return [
        -sum(
            logprob(pattern.roles, int(DATA.tokens[row, position]), position)
            for position in range(DATA.seq_len)
            if DATA.scored[row, position]
        )
        for row in range(DATA.num_sequences)
    ]
