"""Traffic: the same requests for all, what counts as answered, goodput, and servers that lie or die."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.serving import traffic
from scripts.bench.serving.engines import Limit
from scripts.bench.serving.goodput import Bound, Limits, Unloaded, summary
from scripts.bench.serving.replay import Outcome, replay
from scripts.bench.serving.workload import Agentic, Mixture, Session, Span, Turn
from tests.http_stub import Answering, HttpStub

MIXTURE = Mixture(Span(10, 1000), 100, 1.0, Span(5, 9), 400, 1.0, 500)
AGENTIC = Agentic(50, 3, Span(4, 8), Span(5, 9), 0.0, 500)


class Handler(Answering):
    """Streams as SGLang does; `manner` says what is wrong with it."""

    manner, asked = "", list[Any]()

    def get(self) -> None:
        self.reply({"internal_states": [{}]})

    def post(self, body: Any) -> None:
        type(self).asked.append(body)
        count, manner = body["sampling_params"]["max_new_tokens"], self.manner
        if manner == "refuses":
            self.reply({"error": "full"}, 503)
            return
        self.send_response(200)
        self.end_headers()
        for number in range(1, count + 1):
            ids, said = list(range(20, 20 + number)), number
            if manner == "incremental":
                ids = ids[-1:]
            if manner == "lies":
                ids = ids[:2]
            if manner == "at once" and number < count:
                continue
            if (manner, number) == ("fewer", count):
                break
            if (manner, number) == ("dies", 3):
                self.close_connection = True
                return
            reason = {"type": "abort", "message": "no room"} if (manner, number) == ("aborts", 2) else None
            meta = {"completion_tokens": said, "cached_tokens": 1, "finish_reason": reason}
            event = [1, 2] if manner == "other form" else {"output_ids": ids, "meta_info": meta}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.001)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def served() -> Iterator[tuple[str, type[Handler]]]:
    class Own(Handler):
        manner, asked = "", list[Any]()

    stub = HttpStub(Own)
    yield stub.url, Own
    stub.close()


def test_the_same_seed_gives_the_same_requests() -> None:
    assert MIXTURE.sessions(2.0, 0) == MIXTURE.sessions(2.0, 0) != MIXTURE.sessions(2.0, 1)
    assert AGENTIC.sessions(3, 0) == AGENTIC.sessions(3, 0) != AGENTIC.sessions(3, 1)
    assert [session.prefix for session in AGENTIC.sessions(3, 0)] == [item.prefix for item in AGENTIC.sessions(3, 1)]


@pytest.mark.parametrize("burstiness", [1.0, 0.25])
def test_requests_come_at_the_rate(burstiness: float) -> None:
    """400 gaps of a Gamma distribution: the mean within four standard errors, the variance as its shape says."""
    mixture = Mixture(Span(10, 1000), 100, 1.0, Span(5, 9), 400, burstiness, 500)
    times = [0.0, *(session.turns[0].wait for session in mixture.sessions(2.0, 0))]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(400 * burstiness))
    assert statistics.pvariance(gaps) == pytest.approx(0.25 / burstiness, rel=0.6)


def test_lengths_are_lognormal_within_their_limits() -> None:
    lengths = [len(session.turns[0].new) for session in MIXTURE.sessions(2.0, 0)]
    assert min(lengths) >= 10 and max(lengths) == 1000 and 80 < statistics.median(lengths) < 125
    assert all(10 <= token < 500 for session in MIXTURE.sessions(2.0, 0) for token in session.turns[0].new)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        MIXTURE.sessions(rate, 0)
    with pytest.raises(ValueError, match="expected a positive whole number"):
        AGENTIC.sessions(0.5, 0)


@pytest.mark.parametrize("text", ["3", "0x", "-1s", "fast", "nanx"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a positive"):
        Bound.parse(text)


@pytest.mark.parametrize("manner", ["", "incremental"])
def test_turns_have_all_before_them_as_their_beginning(manner: str, served: tuple[str, type[Handler]]) -> None:
    url, handler = served
    handler.manner = manner
    [session] = AGENTIC.sessions(1, 0)
    outcomes, _ = replay(url, [session], Limit())
    assert [outcome.error for outcome in outcomes] == [None] * 3
    text = list(session.prefix)
    for turn, outcome, asked in zip(session.turns, outcomes, handler.asked, strict=True):
        text += turn.new
        assert asked["input_ids"] == text and outcome.prompt == len(text) and outcome.new == len(turn.new)
        text += range(20, 20 + turn.output)
        assert outcome.output == turn.output and outcome.later == turn.output - 1 and outcome.cached == 1
        assert 0 < outcome.first < outcome.latency and outcome.token > 0.0005


WRONG = {
    "fewer": "says 4 tokens, sent 4, expected 5",
    "lies": "says 5 tokens, sent 2, expected 5",
    "dies": "says 2 tokens, sent 2, expected 5, and no end",
    "aborts": "aborted: no room",
    "refuses": "503: ",
    "at once": "all 5 tokens came at once",
    "other form": "streams another form",
}


@pytest.mark.parametrize("manner", WRONG)
def test_what_is_not_answered_as_asked_has_failed(manner: str, served: tuple[str, type[Handler]]) -> None:
    """So have the turns behind it, which could not be sent; none of them is good, whatever the limits."""
    url, handler = served
    handler.manner = manner
    outcomes, seconds = replay(url, [Session((), (Turn(0, (30,), 5), Turn(0, (31,), 5)))], Limit())
    assert WRONG[manner] in str(outcomes[0].error) and str(outcomes[1].error).startswith("not sent")
    assert len(handler.asked) == 1
    row = summary([(outcomes, seconds)], Limits(Bound(1e9, None), Bound(1e9, None), None))
    assert (row["requests"], row["failed"], row["goodput"], row["met"]) == (2, 2, 0, 0)
    assert row["ttft_ms"] is None and row["tpot_ms"] is None and row["before_first"] is None


def test_times_of_arrival_are_kept_and_a_limit_ends_all(served: tuple[str, type[Handler]]) -> None:
    url, _ = served
    sessions = [Session((), (Turn(wait, (30,), 3),)) for wait in (0.2, 0.0, 60.0)]
    outcomes, seconds = replay(url, sessions, Limit(1.0))
    assert outcomes[0].sent == pytest.approx(0.2, abs=0.15) and outcomes[1].sent < 0.15 and seconds < 5
    assert [outcome.error for outcome in outcomes] == [None, None, "not sent: the time was over"]


def test_goodput_is_of_requests_that_met_both_limits() -> None:
    unloaded = Unloaded((100, 200), (1.0, 2.0), (0.01, 0.01))
    limits = Limits(Bound.parse("2x"), Bound.parse("15ms"), unloaded)
    found = [
        Outcome(0, 150, 150, first=2.9, latency=3.9, later=100, output=101),  # TTFT may be 3.0, TPOT is 10 ms
        Outcome(0, 150, 150, first=3.1, latency=4.1, later=100, output=101),
        Outcome(0, 150, 150, first=2.9, latency=4.9, later=100, output=101),  # TPOT is 20 ms
        Outcome(0, 150, 150, error="503"),
    ]
    row = summary([(found, 4.0), (found[:1], 4.0)], limits)
    assert (row["goodput"], row["goodput_rounds"]) == (2 / 8, [1 / 4, 1 / 4]) and row["met"] == 2 / 5
    assert (row["met_ttft"], row["met_tpot"], row["failed"]) == (3 / 5, 3 / 5, 1)
    assert row["ttft_ms"][0] == pytest.approx(2900) and row["output_tokens_per_s"] == 404 / 8
    none = summary([(found, 4.0)], Limits(Bound.parse("1ms"), Bound.parse("1ms"), None))
    assert none["goodput"] == 0 and none["met"] == 0 and none["ttft_ms"] is not None


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    small = (
        "--lengths",
        "10:40",
        "--median",
        "20",
        "--requests",
        "6",
        "--prefix",
        "30",
        "--new",
        "4:8",
        "--turns",
        "2",
    )
    more = ("--output-tokens", "4:6", "--think", "0", "--output", str(output))
    monkeypatch.setattr(sys, "argv", ["traffic", *small, *more, *arguments])
    return traffic.main(), json.loads(output.read_text())


def test_a_whole_run(
    served: tuple[str, type[Handler]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two servers get the same requests; the one that lies is named, and the other one goes on."""
    url, _ = served

    class Liar(Handler):
        manner, asked = "lies", list[Any]()

    liar = HttpStub(Liar)
    arguments = ("--endpoint", f"stock={url}", "--endpoint", f"liar={liar.url}", "--rates", "200", "--sessions", "2")
    code, found = run(monkeypatch, tmp_path / "a.json", *arguments, "--ttft", "100x", "--tpot", "100x")
    liar.close()
    assert code == 1 and list(found["lost"]) == ["liar"] and "sent 2" in found["lost"]["liar"]
    assert [(row["workload"], row["load"], row["server"]) for row in found["rows"]] == [
        ("mixture", 200.0, "stock"),
        ("agentic", 2.0, "stock"),
    ]
    assert [row["requests"] for row in found["rows"]] == [12, 8] and all(row["met"] == 1 for row in found["rows"])
    printed = capsys.readouterr().out
    assert "multiples are of {'mixture': 'stock', 'agentic': 'stock'}, alone" in printed and "liar: lost: " in printed


def test_a_server_that_dies_under_load(
    served: tuple[str, type[Handler]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was well while it was alone; its requests have failed, and are in the table."""
    url, handler = served

    class Dying(Handler):
        manner, asked = "", list[Any]()

        def get(self) -> None:
            self.send_error(503) if self.manner == "dies" else super().get()

        def post(self, body: Any) -> None:
            type(self).manner = "dies" if len(self.asked) > 20 else ""
            super().post(body)

    dying = HttpStub(Dying)
    arguments = ("--endpoint", f"stock={url}", "--endpoint", f"dying={dying.url}", "--rates", "100,200")
    code, found = run(monkeypatch, tmp_path / "a.json", *arguments, "--ttft", "10s", "--tpot", "10s")
    dying.close()
    assert code == 1 and list(found["lost"]) == ["dying"]
    rows = {(row["load"], row["server"]): row for row in found["rows"]}
    assert rows[100.0, "dying"]["failed"] > 0 and (200.0, "dying") not in rows
    assert rows[100.0, "stock"]["failed"] == rows[200.0, "stock"]["failed"] == 0 and handler.asked


def test_what_was_measured_before_the_limit_is_written(
    served: tuple[str, type[Handler]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = served
    arguments = ("--endpoint", f"stock={url}", "--rates", "200,0.01", "--limit", "3")
    code, found = run(monkeypatch, tmp_path / "a.json", *arguments)
    assert code == 1 and [row["load"] for row in found["rows"]] == [200.0] and found["lost"] == {}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--endpoint", "a=http://127.0.0.1:9", "--rates", "0"), "expected a positive number"),
        (("--endpoint", "a=http://127.0.0.1:9"), "expected --rates or --sessions"),
        (("--rates", "1"), "expected either conditions"),
        (("--endpoint", "a=ftp://x", "--rates", "1"), "expected NAME=http://HOST:PORT"),
    ],
)
def test_a_wrong_command_line_gets_one_line(
    arguments: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, tmp_path / "a.json", *arguments)
    assert caught.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]
