"""Two searches on one calibration server of real SGLang: one has it, and nothing of the other gets into its results."""

from __future__ import annotations

import os
import signal
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.answers import Rank
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from indexcache_search.eval.unswitched import Unswitched
from sglang_indexcache.calibration import protocol
from sglang_indexcache.http.address import Address
from tests.live.calibrating import (
    MODEL,
    PATTERNS,
    close_engines,
    finished,
    given_back,
    live_engine,
    losses,
    search,
    server,
    single,
    wait_for_evaluations,
)
from tests.live.server import Server, start

__all__ = ["given_back", "server", "single"]
pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("given_back")]


def test_two_searches_on_one_server(server: Server, single: TokenSet) -> None:
    """One has it, and finds what it finds alone; the other ends with one line, and so does a switch without a token."""
    alone = losses(live_engine(server), single)
    alone_kl = losses(live_engine(server), single, "kl")
    first = live_engine(server)

    def second() -> str:
        with pytest.raises(SearchError, match="expected one search a server") as caught:
            SglangEngine([CalibrationServer(server.url)], MODEL)
        for token in ("", "t" * 32):
            with pytest.raises(urllib.error.HTTPError, match="Locked"):
                server.post("/indexcache/switch", pattern=PATTERNS[2].roles, protocol=protocol.VERSION, token=token)
        with pytest.raises(urllib.error.HTTPError, match="Bad Request"):  # a client that knows of no lease
            server.post("/indexcache/switch", pattern=PATTERNS[2].roles)
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        assert losses(first, single) == alone and losses(first, single, "kl") == alone_kl
        line = other.result()
    assert f"process {os.getpid()} on " in line and "\n" not in line
    switches = first._lanes[0].status().switches
    assert first._lanes[0].undisturbed().switches == switches > 2 * len(PATTERNS)


def test_a_lease_that_ends_during_an_evaluation(server: Server, single: TokenSet) -> None:
    """Another client switches in the middle, as after a nap of this one: nothing of it is kept, and it says so."""
    searching = live_engine(server)
    wanted = losses(searching, single, patterns=PATTERNS[1:2])
    lane, taken = searching._lanes[0], list[Rank]()
    logprobs = lane.logprobs

    def napping(*arguments: Any) -> Any:
        found = logprobs(*arguments)
        if not taken:
            server.post("/indexcache/release", protocol=protocol.VERSION, token=lane._lease.token)
            thief = CalibrationServer(server.url)
            thief.switch(PATTERNS[2])
            taken.append(thief.status())
            thief.release()
        return found

    lane.logprobs = napping  # type: ignore[method-assign]
    with pytest.raises(SearchError, match=f"somebody else switched it to {PATTERNS[2].roles}"):
        losses(searching, single, patterns=PATTERNS[1:2])
    assert losses(live_engine(server), single, patterns=PATTERNS[1:2]) == wanted


def test_a_server_that_a_search_has_is_not_compared(server: Server, single: TokenSet) -> None:
    """indexcache-eval asks before its first sequence and behind its last one."""
    address, searching = [Address.of(f"{server.url}/v1")], live_engine(server)
    with pytest.raises(SearchError, match=r"has switched its patterns for .*; expected a server whose pattern stays"):
        Unswitched(address)
    searching.close()
    unswitched = Unswitched(address)
    unswitched.check()
    losses(live_engine(server), single, patterns=PATTERNS[1:2])
    close_engines()
    with pytest.raises(SearchError, match="its pattern was switched"):
        unswitched.check()


def test_two_searches_on_the_command_line(server: Server, tmp_path: Path) -> None:
    """The second ends with one line; once the first is interrupted, the same command has the server at once."""
    first = search(tmp_path / "first", "--endpoint", server.url, "--num-sequences", "16")  # longer than a start
    second = search(tmp_path / "second", "--endpoint", server.url)
    process = start(first, tmp_path / "first.log")
    wait_for_evaluations(tmp_path / "first", 4, process)
    refused = start(second, tmp_path / "second.log")
    code, lines = refused.wait(300), (tmp_path / "second.log").read_text().splitlines()
    assert code == 2 and len(lines) == 1, lines
    assert f"{server.url}: process {process.pid} on " in lines[0] and "expected one search a server" in lines[0]
    assert not (tmp_path / "second" / "work" / "journal.jsonl").exists()
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(300) == 130
    finished(second, tmp_path / "second.log")
