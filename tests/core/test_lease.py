"""The lease of a calibration server, and its route: who may switch, until when, and what a server says to others."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.lease import Lease
from sglang_indexcache.calibration.preflight import CalibrationError
from sglang_indexcache.calibration.route import Route
from sglang_indexcache.io.messages import BUSY

ANN, BOB = "ann" * 8, "bob" * 8


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """Two data-parallel ranks; `busy` ones refuse to switch."""

    def __init__(self) -> None:
        self.switched, self.asked, self.busy = [0, 0], list[dict[str, Any]](), set[int]()
        self.meanwhile = lambda action: None

    async def ask(self, body: dict[str, Any]) -> list[Any]:
        self.asked.append(body)
        await asyncio.sleep(0)
        replies = []
        for rank in range(2):
            error = protocol.busy(BUSY) if rank in self.busy and body["action"] == "check" else ""
            self.switched[rank] += body["action"] == "switch"
            replies.append(SimpleNamespace(success=not error, response=[{"dp_rank": rank}], error=error))
        self.meanwhile(body["action"])
        return replies


def words(token: str = ANN, **more: Any) -> dict[str, Any]:
    return {"protocol": protocol.VERSION, "token": token, "host": "gpu7", "process": 12, "seconds": 60.0, **more}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def route(ranks: Ranks, clock: Clock) -> Route:
    return Route(ranks.ask, Lease(clock))


def ask(route: Route, action: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return asyncio.run(route.answer(action, body))


def test_one_client_at_a_time(clock: Clock) -> None:
    lease = Lease(clock)
    assert lease.take(words(ANN))["granted"]
    clock.now += 59
    refused = lease.take(words(BOB, host="gpu8", process=13))
    assert (refused.pop("host"), refused.pop("process")) == ("gpu7", 12)
    assert refused == {"granted": False, "beats": 1, "held_s": 59.0, "ends_in_s": 1.0}
    lease.check(ANN)  # any request of the holder renews it
    clock.now += 59
    with pytest.raises(CalibrationError, match="process 12 on gpu7 holds the lease, expected its token"):
        lease.check(BOB)
    assert not lease.take(words(BOB))["granted"] and lease.take(words(ANN))["held_s"] == 118.0


def test_a_client_that_dies_has_nothing_after_a_minute(clock: Clock) -> None:
    lease = Lease(clock)
    lease.take(words(ANN))
    clock.now += protocol.LEASE_SECONDS
    with pytest.raises(CalibrationError, match="nobody holds the lease"):
        lease.check(ANN)
    assert lease.take(words(BOB))["granted"]
    with pytest.raises(CalibrationError, match="holds the lease"):  # an old token is worth nothing
        lease.check(ANN)
    assert not lease.take(words(ANN))["granted"]


def test_a_released_lease_is_free_at_once_and_stays_so(clock: Clock) -> None:
    """A renewal that is late, of a client that has ended, must not block others for a minute."""
    lease = Lease(clock)
    lease.take(words(ANN))
    lease.release(BOB)
    lease.check(ANN)
    lease.release(ANN)
    assert lease.state() == {"beats": 2}
    assert not lease.take(words(ANN))["granted"]
    assert lease.take(words("cleo" * 8))["granted"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"token": "short"}, "token: String should have at least 16"),
        ({"token": None}, "token: "),
        ({"token": 5}, "token: "),
        ({"seconds": 61.0}, "seconds: Input should be less than or equal to 60"),
        ({"seconds": 0.0}, "seconds: Input should be greater than 0"),
        ({"seconds": float("nan")}, "seconds: "),
        ({"seconds": True}, "seconds: "),
        ({"host": "a\nb"}, "host: "),
        ({"process": -1}, "process: "),
    ],
)
def test_requests_that_are_none(clock: Clock, more: dict[str, Any], message: str) -> None:
    lease = Lease(clock)
    with pytest.raises(CalibrationError, match=message) as caught:
        lease.take(words(**more))
    assert "\n" not in str(caught.value) and lease.state() == {"beats": 0}


@pytest.mark.parametrize("action", ["check", "switch", "baseline", "kl", "sample", "overlap", "another"])
def test_all_but_the_status_needs_the_token(route: Route, ranks: Ranks, action: str) -> None:
    """Whoever announces other data, or ends a count, spoils a measurement as a switch does."""
    for body in (words(ANN), words("")):
        code, answer = ask(route, action, body)
        assert code == protocol.LOCKED and answer["error"].startswith("nobody holds the lease")
    ask(route, "lease", words(ANN))
    code, answer = ask(route, action, words(BOB))
    assert code == protocol.LOCKED and "process 12 on gpu7 holds the lease" in answer["error"]
    assert not ranks.asked
    assert ask(route, action, words(ANN))[0] == 200 and "token" not in ranks.asked[-1]


def test_the_status_is_for_everybody_and_says_who_holds_the_lease(route: Route) -> None:
    assert ask(route, "status", {}) == (200, {"ranks": [{"dp_rank": 0}, {"dp_rank": 1}], "lease": {"beats": 0}})
    ask(route, "lease", words(ANN))
    _, answer = ask(route, "status", {})
    assert answer["lease"]["process"] == 12 and ANN not in str(answer)


@pytest.mark.parametrize("version", [None, 1, 3, "2.0", [7]])
def test_another_version_of_the_protocol(route: Route, ranks: Ranks, version: Any) -> None:
    """A client without leases would switch under others; it is told so in its own words for a refusal."""
    body = {"dp_rank": None, "pattern": "FS"} | ({} if version is None else {"protocol": version})
    code, answer = ask(route, "switch", body)
    assert code == protocol.BAD_REQUEST and not ranks.asked
    assert answer["error"].startswith("the server speaks version 2 of the calibration protocol, the client version")
    assert f"client version {version or 1}; expected the same" in answer["error"]


def test_what_one_rank_can_not_do_none_does(route: Route, ranks: Ranks) -> None:
    ask(route, "lease", words(ANN))
    ranks.busy = {1}
    assert ask(route, "switch", words(ANN)) == (protocol.CONFLICT, {"error": f"busy: {BUSY}"})
    assert ranks.switched == [0, 0]


def test_a_lease_that_ends_between_the_phases_of_a_switch(route: Route, ranks: Ranks, clock: Clock) -> None:
    ask(route, "lease", words(ANN))

    def meanwhile(action: str) -> None:
        clock.now += 60.0

    ranks.meanwhile = meanwhile
    assert ask(route, "switch", words(ANN))[0] == protocol.LOCKED
    assert ranks.switched == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_at_any_time_one_client_alone_can_switch(seed: int) -> None:
    """Three clients that take, renew, release, switch and vanish in any order."""
    rng, clock, ranks = random.Random(seed), Clock(), Ranks()
    lease = Lease(clock)
    route = Route(ranks.ask, lease)
    tokens = [f"client {number}" * 3 for number in range(3)]
    allowed: dict[str, float] = {}  # by token, until when at the latest

    async def act() -> None:
        token, action = rng.choice(tokens), rng.choice(["lease", "switch", "switch", "release", "wait"])
        if action == "wait":
            clock.now += rng.choice([1.0, 30.0, 59.0, 61.0])
            return
        code, answer = await route.answer(action, words(token))
        others = [other for other, until in allowed.items() if other != token and until > clock.now]
        if action == "release":
            allowed.pop(token, None)
            tokens[tokens.index(token)] = f"{token[:-1]}{rng.randrange(10**6)}"
        elif (action == "lease" and answer["granted"]) or (action == "switch" and code == 200):
            assert not others
            allowed[token] = clock.now + 60.0

    async def run() -> None:
        for _ in range(100):
            await act()

    asyncio.run(run())
    assert sum(ranks.switched) > 0
