"""The live engine against servers that answer like SGLang's: sharing work, losing servers, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from indexcache_search.engines import calibration_server
from indexcache_search.engines.calibration_server import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from sglang_indexcache import DsaModel, Pattern
from tests.conftest import LAYERS, random_tokens, tiny_config

MODEL = DsaModel.from_config(tiny_config(), "tiny")
PATTERNS = [Pattern.full(LAYERS, {layer}) for layer in range(1, LAYERS)]
DATA = random_tokens()
VERSIONS = {"sglang": "0.5.23", "torch": "2.14.1", "dtype": "float32"}


def logprob(pattern: str, token: int, position: int) -> float:
    """Made up, and different for every pattern, token and position."""
    return -1.0 - (hash((pattern, token, position)) % 1000) / 1000


class Stub:
    """A calibration server of threads; `fail` decides what a request is answered with instead."""

    def __init__(self) -> None:
        self.pattern, self.requests = "F" * LAYERS, 0
        self.config_sha256, self.versions = MODEL.config_sha256, VERSIONS
        self.fail: Callable[[str], tuple[int, Any] | None] = lambda path: None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.requests += 1
                code, answer = stub.fail(self.path) or (200, stub.answer(self.path, body))
                if code == 0:  # the server is killed in mid-answer
                    self.connection.close()
                    return
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def answer(self, path: str, body: Any) -> Any:
        if path == "/generate":
            start = body["logprob_start_len"]
            return [{"meta_info": self.scores(tokens, start)} for tokens in body["input_ids"]]
        if path == "/indexcache/switch":
            self.pattern = body["pattern"]
        return {
            "pattern": self.pattern,
            "fingerprint": Pattern(self.pattern).fingerprint,
            "config_sha256": self.config_sha256,
            "versions": self.versions,
        }

    def scores(self, tokens: list[int], start: int) -> dict[str, Any]:
        own: list[Any] = [[None, tokens[start], None]]
        best: list[Any] = [None]
        for position in range(start + 1, len(tokens)):
            value = logprob(self.pattern, tokens[position], position)
            own.append([value, tokens[position], None])
            best.append([[value, tokens[position] if position % 2 else 0, None]])
        return {"input_token_logprobs": own, "input_top_logprobs": best}


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    made = [Stub(), Stub()]
    yield made
    for stub in made:
        stub.http.shutdown()
        stub.http.server_close()


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


def test_losses_are_sums_over_the_scored_tokens(stubs: list[Stub]) -> None:
    for batch_size in (1, 2):
        found = list(engine(stubs[0], batch_size=batch_size).evaluate(PATTERNS[:2], DATA, "nll"))
        assert [item.pattern for item in found] == PATTERNS[:2]
        for item in found:
            assert list(item.losses) == pytest.approx(expected(item.pattern), abs=1e-12)
            assert item.tokens == tuple(DATA.scored.sum(axis=1))
            assert item.correct == tuple(int(DATA.scored[row][1::2].sum()) for row in range(DATA.num_sequences))


def test_what_a_result_depends_on(stubs: list[Stub]) -> None:
    live = engine(stubs[0], batch_size=2)
    assert live.name == "sglang 0.5.23"
    assert live.settings == {"torch": "2.14.1", "dtype": "float32", "batch_size": "2"}


def test_two_servers_share_the_work(stubs: list[Stub]) -> None:
    found = {item.pattern: item.losses for item in engine(*stubs).evaluate(PATTERNS, DATA, "nll")}
    assert set(found) == set(PATTERNS)
    assert all(list(losses) == pytest.approx(expected(pattern)) for pattern, losses in found.items())
    assert min(stub.requests for stub in stubs) > 1


@pytest.mark.parametrize("code", [0, 500, 503])
def test_a_lost_server_loses_no_evaluation(stubs: list[Stub], code: int) -> None:
    count = 0

    def fail(path: str) -> tuple[int, Any] | None:
        nonlocal count
        count += path == "/generate"
        return (code, {}) if count > 2 else None

    stubs[0].fail = fail
    found = {item.pattern: item.losses for item in engine(*stubs, patience=0.5).evaluate(PATTERNS, DATA, "nll")}
    assert all(list(found[pattern]) == pytest.approx(expected(pattern)) for pattern in PATTERNS)


def test_a_server_that_comes_back_goes_on(stubs: list[Stub]) -> None:
    gone = iter([None] * 3 + [(0, None)] * 2)
    stubs[0].fail = lambda path: next(gone, None)
    live = engine(stubs[0], patience=30)
    found = {item.pattern: item.losses for item in live.evaluate(PATTERNS, DATA, "nll")}
    assert all(list(found[pattern]) == pytest.approx(expected(pattern)) for pattern in PATTERNS)


def test_when_all_stay_away_it_says_so(stubs: list[Stub]) -> None:
    live = engine(*stubs, patience=0.6)
    for stub in stubs:
        stub.fail = lambda path: (0, None)
    with pytest.raises(SearchError, match=r"no server came back within 1 s: http://127"):
        list(live.evaluate(PATTERNS, DATA, "nll"))


def test_a_busy_server_is_waited_for(stubs: list[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (409, {"error": "busy: requests are running"})
    answers = iter([busy, busy])
    stubs[0].fail = lambda path: next(answers, None) if path == "/indexcache/switch" else None
    live = engine(stubs[0])
    assert len(list(live.evaluate(PATTERNS[:1], DATA, "nll"))) == 1
    monkeypatch.setattr(calibration_server, "BUSY_SECONDS", 0.1)
    stubs[0].fail = lambda path: busy if path == "/indexcache/switch" else None
    with pytest.raises(calibration_server.ServerLostError, match="busy: requests are running"):
        CalibrationServer(stubs[0].url).switch(PATTERNS[0])


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/indexcache/status", (404, {"detail": "Not Found"}), "is not in calibration mode"),
        ("/indexcache/status", (401, {"error": "Unauthorized"}), "refuses the key; expected the admin key"),
        ("/indexcache/switch", (400, {"error": "CUDA graphs are on"}), "CUDA graphs are on"),
        ("/indexcache/switch", (200, {"pattern": "FFFFFF", "fingerprint": "x"}), "runs FFFFFF after a switch to"),
        ("/generate", (400, {"error": {"message": "too long"}}), "too long"),
        ("/generate", (200, []), "answers without input logprobs"),
        ("/generate", (200, [{"meta_info": {}}]), "answers without input logprobs"),
    ],
)
def test_refusals_end_the_search(stubs: list[Stub], path: str, answer: Any, message: str) -> None:
    stubs[0].fail = lambda asked: answer if asked == path else None
    with pytest.raises(SearchError, match=message):
        list(engine(stubs[0]).evaluate(PATTERNS[:1], DATA, "nll"))


def test_servers_must_be_of_one_kind(stubs: list[Stub]) -> None:
    stubs[1].versions = {**VERSIONS, "dtype": "bfloat16"}
    with pytest.raises(SearchError, match="expected the same"):
        engine(*stubs)
    stubs[1].config_sha256 = "0" * 64
    with pytest.raises(SearchError, match="serves another model than --model tiny"):
        engine(*stubs)
    with pytest.raises(SearchError, match="expected a URL"):
        CalibrationServer("host:30000")


def test_losses_that_are_not_numbers_stay_so(stubs: list[Stub]) -> None:
    """SGLang writes NaN as null; the search stops at it, with its own line."""
    scores = stubs[0].scores

    def poisoned(tokens: list[int], start: int) -> dict[str, Any]:
        found = scores(tokens, start)
        found["input_token_logprobs"][-1][0] = None
        return found

    stubs[0].scores = poisoned  # type: ignore[method-assign]
    [item] = engine(stubs[0]).evaluate(PATTERNS[:1], DATA, "nll")
    assert all(loss != loss for loss in item.losses)
