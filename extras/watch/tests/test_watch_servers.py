"""indexcache-watch: which servers losses are of, and servers that do not answer for a while."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from extras.watch.tests.watching import Stub, finished, log_of_forty, losing_requests, pair_of_servers, watch
from indexcache_search.engines.own_server import free_port
from indexcache_watch import outage, record
from indexcache_watch import run as run_module

GOOD, BAD = "a" * 64, "b" * 64


@pytest.fixture
def pair() -> Iterator[tuple[Stub, Stub]]:
    with pair_of_servers() as servers:
        yield servers


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_of_forty(tmp_path)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries, which pass at once."""
    found: list[float] = []

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

        @classmethod
        def sleep(cls, seconds: float) -> None:
            cls.now += seconds
            found.append(seconds)

    monkeypatch.setattr(outage, "time", Clock)
    return found


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "watch.jsonl").read_text().splitlines()]


# -- whose losses


def test_rows_say_of_which_patterns_they_are(pair: tuple[Stub, Stub], log: Path, tmp_path: Path) -> None:
    assert watch(pair, log).exit_code == 0
    first, *others = rows(tmp_path)
    assert (first["schema"], first["model"], first["reference_model"]) == (record.SCHEMA, "glm5", "glm5")
    assert {(row["fingerprint"], row["reference_fingerprint"]) for row in (first, *others)} == {(GOOD, "none")}


EXCHANGES: dict[str, tuple[int, str, Any, str]] = {
    "another pattern": (0, "fingerprint", BAD, "serves another pattern than when this watch began: bbbb"),
    "no pattern": (0, "fingerprint", None, "serves another pattern than when this watch began: none"),
    "another model": (0, "model", "glm4", "serves another model than when this watch began: glm4, expected glm5"),
    "a reference with a pattern": (1, "fingerprint", BAD, "serves a pattern, fingerprint bbbb"),
    "a reference with the pattern": (1, "fingerprint", GOOD, "serves the same pattern, fingerprint aaaa"),
    "a reference of another model": (1, "model", "glm4", "serves another model than when this watch began: glm4"),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_after_a_roll_back_nothing_of_the_other_server_is_blamed_on_this_one(
    pair: tuple[Stub, Stub], log: Path, tmp_path: Path, name: str
) -> None:
    """Rows of a pattern that came and went would count against the good one, for ever."""
    side, what, value, message = EXCHANGES[name]
    before, after = getattr(pair[side], what), 12

    def exchange(token: int) -> float:
        """After so many requests another server answers, and loses 9 nats a token."""
        if len(pair[0].asked) > after:
            setattr(pair[side], what, value)
            return 9.0
        return 1.0

    pair[0].loss = exchange
    result = watch(pair, log)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    assert len(rows(tmp_path)) == 1 + after
    pair[0].loss = lambda token: 1.0
    if side == 0:
        assert watch(pair, log).exit_code == 2  # as long as the other one serves
    setattr(pair[side], what, before)
    result = watch(pair, log)
    assert result.exit_code == 0, result.output
    assert len(rows(tmp_path)) == 41 and all(row["served"] == row["reference"] for row in rows(tmp_path)[1:])


def test_a_reference_that_is_exchanged_between_two_runs_is_seen(pair: tuple[Stub, Stub], log: Path) -> None:
    assert watch(pair, log, "--num-requests", "3").exit_code == 0
    pair[1].model = "glm4"
    result = watch(pair, log)
    assert result.exit_code == 2 and "belongs to a watch with reference_model glm5, now it is glm4" in result.stderr


def test_a_record_of_an_earlier_version_gets_one_line(pair: tuple[Stub, Stub], log: Path, tmp_path: Path) -> None:
    """Its rows may be of any pattern."""
    assert watch(pair, log, "--num-requests", "1").exit_code == 0
    sealer, path = record.Sealer(), tmp_path / "out" / "watch.jsonl"
    header = {"served": pair[0].url, "reference": pair[1].url, "fingerprint": GOOD, "allowed": 0.1, "alpha": 0.005}
    row = {"request": "0" * 16, "length": 5, "tokens": 2, "served": 2.0, "reference": 2.0}
    old = sealer.seal({**header, "buckets": [2048]}) + sealer.seal(row)
    path.write_bytes(old)
    result = watch(pair, log)
    assert result.exit_code == 2 and "an earlier version wrote it" in result.stderr and "--restart" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and path.read_bytes() == old
    assert watch(pair, log, "--restart").exit_code == 0


def test_a_row_of_another_pattern_is_not_counted(pair: tuple[Stub, Stub], log: Path, tmp_path: Path) -> None:
    assert watch(pair, log, "--num-requests", "2").exit_code == 0
    header, *others = rows(tmp_path)
    sealer, path = record.Sealer(), tmp_path / "out" / "watch.jsonl"
    changed = [header, others[0], {**others[1], "fingerprint": BAD}]
    path.write_bytes(b"".join(sealer.seal({k: v for k, v in row.items() if k != "check"}) for row in changed))
    result = watch(pair, log)
    assert result.exit_code == 2 and "line 3 is damaged" in result.stderr


# -- outages


@pytest.mark.parametrize("side", [0, 1], ids=["served", "reference"])
@pytest.mark.parametrize(
    ("code", "failing"),
    [
        *itertools.product((503, None), (("GET",), ("POST",), ("GET", "POST"))),
        *((code, ("POST",)) for code in (502, 429, 500)),
    ],
    ids=str,
)
def test_a_server_that_does_not_answer_for_a_while_is_waited_for(
    pair: tuple[Stub, Stub],
    log: Path,
    tmp_path: Path,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    side: int,
    code: int | None,
    failing: tuple[str, ...],
) -> None:
    """One 503 would end a watch that follows; no request may be lost or counted twice by it."""
    pair[side].failing = failing

    def fail(token: int) -> float:
        if len(pair[0].asked) == 7 and not pauses:
            pair[side].failures = [code] * 3
        return 1.0

    pair[0].loss = fail

    def sleep(seconds: float) -> None:
        if seconds == run_module.POLL_SECONDS:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))

    result = watch(pair, log, "--follow")
    assert "Traceback" not in result.output
    begins, ends = [line for line in result.stderr.splitlines() if "answer" in line or "can't be read" in line][:2]
    assert begins.endswith("waiting until both servers answer") and pair[side].url in begins
    assert ends.startswith("both servers answer again, after ")
    assert pauses == [1.0, 2.0, 4.0]
    found = [row["request"] for row in rows(tmp_path)[1:]]
    assert len(found) == len(set(found)) == 40


def test_pauses_grow_up_to_a_minute_and_are_counted(
    pair: tuple[Stub, Stub], log: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, seen = free_port(), list[str]()

    def sleep(seconds: float) -> None:
        if seconds == run_module.POLL_SECONDS:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                seen.extend(answer.read().decode().splitlines())
            raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))

    def fail(token: int) -> float:
        if not pauses:
            pair[1].failures = [503] * 9
        return 1.0

    pair[0].loss = fail
    watch(pair, log, "--follow", "--port", str(port))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert "indexcache_watch_outage_seconds_total 243.0" in seen


def test_without_follow_a_watch_gives_up_after_some_tries(
    pair: tuple[Stub, Stub], log: Path, tmp_path: Path, pauses: list[float]
) -> None:
    def fail(token: int) -> float:
        if len(pair[0].asked) == 5:
            pair[0].failures = [503] * 99
        return 1.0

    pair[0].loss = fail
    result = watch(pair, log)
    assert result.exit_code == 2 and pauses == [1.0, 2.0, 4.0, 8.0]
    assert "/server_info answers 503: " in result.stderr and "; gave up after 5 tries" in result.stderr
    pair[0].failures, pair[0].loss = [], lambda token: 1.0
    assert watch(pair, log).exit_code == 0 and len(rows(tmp_path)) == 41


def test_a_request_that_a_server_fails_on_each_time_is_left_out(
    pair: tuple[Stub, Stub], log: Path, tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that asked for it again for ever would see nothing else."""
    pair[0].failing = ("POST",)
    pair[0].failures = [500] * 5

    def sleep(seconds: float) -> None:
        if seconds == run_module.POLL_SECONDS:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    watch(pair, log, "--follow")
    assert len(rows(tmp_path)) == 40 and len(pauses) == 4


def test_a_server_that_comes_back_with_another_pattern_ends_the_watch(
    pair: tuple[Stub, Stub], log: Path, tmp_path: Path, pauses: list[float]
) -> None:
    def fail(token: int) -> float:
        if len(pair[0].asked) == 5:
            pair[0].failures, pair[0].fingerprint = [503, 503], BAD
        return 1.0

    pair[1].loss = fail
    result = watch(pair, log, "--follow")
    assert result.exit_code == 2 and "serves another pattern than when this watch began" in result.stderr
    assert len(rows(tmp_path)) == 5


def test_at_the_start_nobody_waits(pair: tuple[Stub, Stub], log: Path, pauses: list[float]) -> None:
    """A wrong URL would never answer."""
    pair[1].failures = [503]
    result = watch(pair, log, "--follow")
    assert result.exit_code == 2 and "answers 503" in result.stderr and not pauses


# -- metrics


def test_metrics_are_for_this_machine_alone_unless_said(
    pair: tuple[Stub, Stub], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "indexcache_watch.metrics.start_http_server", lambda port, **more: asked.append((port, more["addr"]))
    )
    assert watch(pair, log, "--port", "9400").exit_code == 0
    assert watch(pair, log, "--port", "9400", "--host", "0.0.0.0").exit_code == 0
    assert asked == [(9400, "127.0.0.1"), (9400, "0.0.0.0")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--host", "0.0.0.0"], "--host needs --port"),
        (["--port", "9400", "--host", ""], "expected an address such as 127.0.0.1"),
        (["--port", "9400", "--host", "no.such.host.invalid"], "which can't be had"),
    ],
)
def test_an_address_that_can_not_be_gets_one_line(
    pair: tuple[Stub, Stub], log: Path, more: list[str], message: str
) -> None:
    result = watch(pair, log, *more)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_what_is_cut_off_stands_beside_what_is_not(pair: tuple[Stub, Stub], log: Path) -> None:
    pair[0].loss = lambda token: 12.0 if token >= 50 else 1.0
    log.write_text(finished([1], [3, 4]) + losing_requests(60))
    result = watch(pair, log)
    assert result.exit_code == 1 and " cut off) after " in result.stderr.replace("\n", " ")
