"""indexcache-eval on servers whose patterns a search switches meanwhile, or might."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.errors import SearchError
from indexcache_search.eval.unswitched import Unswitched
from sglang_indexcache.http.address import Address
from tests.search.calibration_stub import PATTERNS, Stub
from tests.search.test_compare import Stub as Plain
from tests.search.test_compare import run


class Completing(Stub):
    """A calibration server that completes prompts, too; `meanwhile` is called before each of them."""

    def __init__(self) -> None:
        self.completed = 0
        self.states: list[dict[str, Any]] | None = None  # in `/server_info`; by default those of `Stub`
        self.meanwhile: Callable[[], object] = lambda: None
        super().__init__()

    def read(self, path: str) -> tuple[int, Any]:
        if path == "/server_info" and self.states is not None:
            return 200, {"internal_states": self.states}
        return (200, {"data": [{"id": "stub"}]}) if path == "/v1/models" else super().read(path)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/v1/completions":
            return super().answer(path, body)
        self.completed += 1
        self.meanwhile()
        values = [None, *(-token / 100 for token in body["prompt"][1:]), -1.0]
        tops = [None, *({"x": value or 0.0} for value in values[1:])]
        return 200, {"choices": [{"text": "", "logprobs": {"token_logprobs": values, "top_logprobs": tops}}]}


@pytest.fixture
def server() -> Iterator[Completing]:
    made = Completing()
    yield made
    made.http.shutdown()
    made.http.server_close()


def compared(server: Completing, folder: Path) -> Any:
    urls = ["--endpoint", server.url, "--endpoint", f"{server.url}/v1"]
    return run(*urls, "--evaluation", "demo:copy", "--num-sequences", "2", "--output", str(folder))


def test_a_calibration_server_that_a_search_holds_is_refused(server: Completing, tmp_path: Path) -> None:
    """Its pattern may change between two sequences; both lines of the table would be of several patterns."""
    search = CalibrationServer(server.url)
    search.hold()
    result = compared(server, tmp_path)
    assert result.exit_code == 2 and server.completed == 0
    [line] = result.stderr.splitlines()[-1:]
    assert line.startswith(f"indexcache-eval: {server.url}: process ") and "has switched its patterns for" in line
    assert line.endswith("expected a server whose pattern stays")
    search.release()
    assert compared(server, tmp_path).exit_code == 0


@pytest.mark.parametrize("released", [False, True], ids=["holds it", "has ended"])
def test_a_search_that_begins_meanwhile_ends_the_comparison(server: Completing, tmp_path: Path, released: bool) -> None:
    def search() -> None:
        if server.completed == 3:
            other = CalibrationServer(server.url)
            other.hold()
            other.switch(PATTERNS[1])
            searches.append(other)
            if released:
                other.release()

    searches, server.meanwhile = list[CalibrationServer](), search
    result = compared(server, tmp_path)
    assert result.exit_code == 2 and not (tmp_path / "eval.json").exists()
    assert ("its pattern was switched" if released else "has switched its patterns for") in result.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [(401, "is a calibration server that refuses the key; expected its admin key"), (503, "answers 503")],
)
def test_a_calibration_server_that_does_not_say_is_refused(server: Completing, code: int, message: str) -> None:
    server.fail = lambda path: (code, None)
    with pytest.raises(SearchError, match=message):
        Unswitched([Address.of(server.url)])
    server.fail = lambda path: (200, {"ranks": "?"})
    with pytest.raises(SearchError, match=r"answers in another form: .*; expected a server whose pattern stays"):
        Unswitched([Address.of(server.url)])


def test_other_servers_are_not_asked_anything(server: Completing) -> None:
    plain = Plain(1.0, "whatever")
    Unswitched([Address.of(plain.url), Address.of("http://127.0.0.1:9")]).check()
    assert plain.asked == []
    plain.http.shutdown()
    plain.http.server_close()


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (None, "is a calibration server of an older sglang-indexcache, which a search may switch"),
        ((401, None), "answers 401 to the question whether it is a calibration server of an older sglang-indexcache"),
        ((200, "?"), "is a calibration server of an older sglang-indexcache, which a search may switch"),
        ((404, None), None),
    ],
    ids=["older", "no key", "another form", "plain SGLang"],
)
def test_what_a_server_that_says_nothing_may_be_is_one_line(
    server: Completing, tmp_path: Path, answer: tuple[int, Any] | None, line: str | None
) -> None:
    """Before `/server_info` said that a server is one for calibration, it was compared without a word."""
    server.states = [{}]
    server.fail = lambda path: answer if path == "/indexcache/status" else None
    result = compared(server, tmp_path)
    assert result.exit_code == 0, result.output
    said = [item for item in result.stderr.splitlines() if "so whether its pattern stays can't be told" in item]
    assert [item.partition(f"{server.url}: ")[2] for item in said] == (
        [] if line is None else [f"{line}, so whether its pattern stays can't be told"]
    )


def test_a_server_with_a_pattern_of_its_own_is_not_asked(server: Completing) -> None:
    server.states = [{"indexcache": {"fingerprint": "1" * 64}}]
    lines = list[str]()
    Unswitched([Address.of(server.url)], lines.append).check()
    assert (lines, server.asked) == ([], [])
