"""Two searches on one calibration server: one has it, the other ends with one line, and nothing wrong is kept."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from indexcache_search.engines import lease as leases
from indexcache_search.engines import sglang
from indexcache_search.engines.calibration_client import CalibrationServer, ServerLostError
from indexcache_search.engines.control_requests import Control
from indexcache_search.engines.lease import HeldLease
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.results.variant import Variant
from indexcache_speed.prompt_times import prompt_times
from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.calibration import protocol
from sglang_indexcache.http.address import Address
from tests.search.calibration_stub import DATA, LAYERS, MODEL, PATTERNS, Stub, divergence, engine, expected

OTHER = "F" + "S" * (LAYERS - 1)
HOST = socket.gethostname()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(sglang, "_Loss", partial(sglang._Loss, pause=0.01))
    made = Stub()
    yield made
    made.close()


def client(stub: Stub, seconds: float = 60.0) -> CalibrationServer:
    address = Address.of(stub.url)
    return CalibrationServer(address, lease=HeldLease(Control(address), seconds))


def right(pattern: Pattern, objective: Objective) -> list[float]:
    """The losses of an undisturbed evaluation."""
    if objective == "nll":
        return expected(pattern)
    rows = [[int(token) - 1, int(token)] for token in DATA.scored[0].nonzero()[0]]
    return [divergence(pattern.roles, rows)[0]] * DATA.num_sequences


def at(path: str, number: int, act: Callable[[], None]) -> Callable[[str], None]:
    """Return what does `act` before the server reads request `number` of `path`."""
    seen = 0

    def look(asked: str) -> None:
        nonlocal seen
        seen += asked == path
        if asked == path and seen == number:
            act()

    return look


def by_somebody_else(stub: Stub) -> None:
    """A switch past the lease, as through another route of SGLang."""
    stub.control("switch", {"pattern": OTHER}, 0)


def by_a_thief(stub: Stub) -> None:
    """The lease has ended, and another client takes it, switches and dies."""
    stub.passed += 61.0
    body = {"protocol": protocol.VERSION, "token": "t" * 32, "host": "thief", "process": 1, "seconds": 0.3}
    assert stub.answer("/indexcache/lease", body)[1]["granted"]
    assert stub.answer("/indexcache/switch", {**body, "pattern": OTHER, "dp_rank": None})[0] == 200


def test_a_second_search_ends_with_one_line_and_the_first_goes_on(stub: Stub) -> None:
    """Without a lease, 5 of 10 evaluations were those of the other one's patterns."""
    first, refused = SglangEngine([client(stub, 1.0)], MODEL), list[str]()

    def second() -> None:
        try:
            list(SglangEngine([client(stub, 1.0)], MODEL).evaluate(PATTERNS, DATA, "nll"))
        except SearchError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=second) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for item in first.evaluate(PATTERNS, DATA, "nll"):
            assert list(item.losses) == pytest.approx(right(item.pattern, "nll"))
    for thread in threads:
        thread.join()
    assert len(refused) == 2
    for line in refused:
        assert line.startswith(f"{stub.url}: process {os.getpid()} on {HOST} has switched its patterns for ")
        assert line.endswith("; expected one search a server") and "\n" not in line and "its lease ends in" in line


def test_a_server_that_is_named_twice(stub: Stub) -> None:
    """Its two lanes would switch it under each other."""
    servers = [client(stub, 0.5), CalibrationServer(stub.url.replace("127.0.0.1", "localhost"))]
    with pytest.raises(SearchError, match=r"this very process: is the server named twice\?"):
        SglangEngine(servers, MODEL)
    engine(stub).close()  # and nothing is held afterwards


def test_a_lease_is_given_back_at_once(stub: Stub) -> None:
    first = engine(stub)
    list(first.evaluate(PATTERNS[:1], DATA, "nll"))
    first.close()
    notices: list[str] = []
    second = engine(stub, notice=notices.append)
    assert not notices
    with pytest.raises(SearchError, match="has released its lease"):
        list(first.evaluate(PATTERNS[:1], DATA, "nll"))
    del second  # without a word
    third = engine(stub, notice=notices.append)
    assert not notices
    third.close()


SEARCH = """
import sys, time
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.control_requests import Control
from indexcache_search.engines.lease import HeldLease
from sglang_indexcache.http.address import Address
from sglang_indexcache import process
def main():
    address = Address.of(sys.argv[1])
    process.let_work_end()
    server = CalibrationServer(address, lease=HeldLease(Control(address), float(sys.argv[2])))
    server.hold()
    print("held", flush=True)
    for _ in range(1000):
        time.sleep(0.2)  # Python answers a signal that comes just before a sleep only after it
process.run("search", main)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=["kill", "ctrl-c", "term"])
def test_a_search_that_ends_leaves_no_lease(stub: Stub, number: int) -> None:
    """At once if a signal lets it; else when the time is over, which the next one waits for: the same command again."""
    command = [sys.executable, "-c", SEARCH, stub.url, "2.0" if number == signal.SIGKILL else "60.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as search:
        assert search.stdout is not None and search.stdout.readline() == b"held\n"
        search.send_signal(number)
        search.wait(120)
    notices: list[str] = []
    again = SglangEngine([client(stub, 1.0)], MODEL, notice=notices.append)
    assert [item.pattern for item in again.evaluate(PATTERNS[:1], DATA, "nll")] == PATTERNS[:1]
    if number == signal.SIGKILL:
        [line] = notices
        assert f"process {search.pid} on {HOST} has switched its patterns" in line and "seems to be gone" in line
    else:
        assert not notices
    again.close()


@pytest.mark.parametrize("path", ["/generate", "/indexcache/status"])
@pytest.mark.parametrize("act", [by_somebody_else, by_a_thief])
@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_a_switch_by_others_is_seen_and_nothing_is_journalled(
    stub: Stub, path: str, act: Callable[[Stub], None], objective: Objective, tmp_path: Path
) -> None:
    """Whether it comes within an evaluation or behind its last answer; with `kl` within the baseline, too."""
    for number in (1, 2, 3):
        searching = SglangEngine([client(stub)], MODEL)
        with Journal(tmp_path / str(number), {"of": "a search"}, {}) as journal:
            evaluator = Evaluator(searching, DATA, objective, journal, "calibration")
            act_once = at(path, number, lambda: act(stub))
            stub.fail = lambda asked, look=act_once: look(asked)  # type: ignore[assignment,misc]
            try:
                evaluator.evaluations(PATTERNS[:1])
            except SearchError as error:
                assert "somebody else switched it" in str(error) or "process 1 on thief has" in str(error)
            stub.fail = lambda asked: None
            kept = journal.evaluation("calibration", PATTERNS[0])
            assert kept is None or list(kept.losses) == pytest.approx(right(PATTERNS[0], objective))
        searching.close()
        stub.restart(1)


@pytest.mark.parametrize("what", ["overlap", "speed"])
@pytest.mark.parametrize("act", [by_somebody_else, by_a_thief])
def test_measurements_under_which_somebody_switched(stub: Stub, what: str, act: Callable[[Stub], None]) -> None:
    """Times and overlaps of another pattern look like any others: they are made again, or not at all."""
    searching = SglangEngine([client(stub)], MODEL)
    calls: dict[str, Callable[[], Any]] = {
        "overlap": lambda: searching.matrix("overlap", DATA, 5),
        "speed": lambda: prompt_times(searching, [Variant.baseline(MODEL.native)], DATA),
    }
    generated: list[str] = []  # the pattern of each prompt whose answer may have counted

    def look(asked: str) -> None:
        if asked == "/generate":
            generated.append(stub.patterns[0])
            if len(generated) == 1:
                act(stub)

    stub.fail = lambda asked: look(asked)  # type: ignore[func-returns-value]
    if act is by_somebody_else or what == "speed":
        with pytest.raises(SearchError, match=r"somebody else switched it"):
            calls[what]()
    else:
        calls[what]()
        again = DATA.num_sequences
        assert set(generated[-again:]) == {MODEL.native.roles} and len(generated) > again
    searching.close()


@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_a_restart_within_an_evaluation(stub: Stub, objective: Objective) -> None:
    """A supervisor may start it again between two requests: the rest would run all F, with nothing to see."""
    for path, number in (("/generate", 2), ("/generate", 5), ("/indexcache/switch", 1), ("/indexcache/status", 6)):
        lines: list[str] = []
        searching = engine(stub, notice=lines.append)
        look = at(path, number, lambda: stub.restart(1))
        stub.fail = lambda asked, look=look: look(asked)  # type: ignore[assignment,misc]
        [item] = searching.evaluate(PATTERNS[:1], DATA, objective)
        assert list(item.losses) == pytest.approx(right(item.pattern, objective))
        stub.fail = lambda asked: None
        searching.close()


def test_a_client_that_slept_goes_on_if_nobody_took_its_place(stub: Stub) -> None:
    lines: list[str] = []
    searching = engine(stub, notice=lines.append)

    def sleep() -> None:
        stub.passed += 61.0

    look = at("/indexcache/kl", 1, sleep)
    stub.fail = lambda asked: look(asked)  # type: ignore[func-returns-value]
    [item] = searching.evaluate(PATTERNS[:1], DATA, "kl")
    assert list(item.losses) == pytest.approx(right(item.pattern, "kl"))
    assert len(lines) == 2 and "its lease ended" in lines[0] and "is back" in lines[1]
    searching.close()


def test_a_client_that_slept_while_another_took_its_place(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_BEATS", 1)
    searching, holder = SglangEngine([client(stub)], MODEL), client(stub, 1.0)  # one renews every 0.1 s, one hardly
    list(searching.evaluate(PATTERNS[:1], DATA, "nll"))
    monkeypatch.undo()
    stub.passed += 61.0
    holder.switch(PATTERNS[2])
    with pytest.raises(SearchError, match=f"process {os.getpid()} on {HOST} has switched its patterns"):
        list(searching.evaluate(PATTERNS[:1], DATA, "nll"))
    assert stub.patterns == [PATTERNS[2].roles]
    holder.release()


def test_a_server_of_before_the_lease(stub: Stub) -> None:
    """It would let anybody switch."""
    status = stub.status(0)
    old = {name: status[name] for name in status if name not in ("protocol", "boot", "switches")}
    stub.fail = lambda path: (200, {"ranks": [{"dp_rank": 0, **old}]})
    for call in (lambda: engine(stub), lambda: CalibrationServer(stub.url).switch(PATTERNS[0])):
        with pytest.raises(SearchError) as caught:
            call()
        assert str(caught.value) == (
            f"{stub.url}: the server speaks version 1 of the calibration protocol, the client version 2; expected the"
            " same sglang-indexcache on both"
        )


def test_a_client_of_before_the_lease(stub: Stub) -> None:
    code, answer = stub.answer("/indexcache/switch", {"pattern": OTHER, "dp_rank": None})
    assert code == 400 and "the server speaks version 2" in answer["error"] and "client version 1" in answer["error"]
    assert stub.patterns == ["F" * LAYERS]


@pytest.mark.parametrize("objective", ["nll", "kl"])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))])
def test_no_evaluation_of_another_pattern_is_ever_kept(
    stub: Stub, seed: int, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two requests of a search a second writer, a liar, the clock or a restart may strike."""
    monkeypatch.setattr(leases._Holder, "renew", lambda self: None)  # what happens depends on the seed alone
    rng = random.Random(seed)
    rate = rng.choice([0.02, 0.05, 0.15])
    second = {"protocol": protocol.VERSION, "token": "s" * 32, "host": "second", "process": 2, "seconds": 0.1}

    def strike(path: str) -> None:
        if rng.random() > rate:
            return
        match rng.randrange(5):
            case 0:
                by_somebody_else(stub)
            case 1:
                stub.passed += rng.choice([30.0, 59.0, 61.0])
            case 2:
                stub.restart(1)
            case 3:
                pattern = rng.choice(PATTERNS).roles
                stub.answer("/indexcache/switch", {**second, "pattern": pattern, "dp_rank": None})
            case 4:
                stub.answer("/indexcache/lease", second)
                pattern = rng.choice([MODEL.native, *PATTERNS]).roles
                stub.answer("/indexcache/switch", {**second, "pattern": pattern, "dp_rank": None})
                stub.answer("/indexcache/baseline", {**second, "data": "d", "ranges": [], "dp_rank": None})
                if rng.random() < 0.5:
                    stub.answer("/indexcache/release", second)
                    second["token"] = f"{rng.randrange(10**20):032}"

    stub.fail = lambda path: strike(path)  # type: ignore[func-returns-value]
    kept, ended = 0, 0
    for _ in range(6):
        try:
            searching = SglangEngine([client(stub, 1.0)], MODEL, patience=1.0)
        except IndexCacheError as error:
            ended += "\n" not in str(error)
            stub.passed += 61.0
            continue
        try:
            for item in searching.evaluate(PATTERNS, DATA, objective):
                kept += 1
                assert list(item.losses) == pytest.approx(right(item.pattern, objective))
        except IndexCacheError as error:
            ended += "\n" not in str(error)
        searching.close()
    assert kept + ended >= 6


def test_a_lease_is_no_lost_server_for_those_that_ask_for_the_status(stub: Stub) -> None:
    holder = client(stub)
    holder.switch(PATTERNS[0])
    assert CalibrationServer(stub.url).status().pattern == PATTERNS[0].roles
    code, answer = stub.answer("/indexcache/status", {"dp_rank": None})
    assert code == 200 and answer["lease"]["host"] == HOST
    holder.release()
    with pytest.raises(ServerLostError):
        stub.fail = lambda path: (423, {"error": "nobody holds the lease"}) if path.endswith("switch") else None
        client(stub).switch(PATTERNS[0])
