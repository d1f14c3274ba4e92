"""indexcache-check --server: do running servers serve this file?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main
from sglang_indexcache.http.client import KEY_VARIABLE
from tests.conftest import tiny_config

PATTERN = Pattern("FSSFSS")


class Handler(BaseHTTPRequestHandler):
    """Answers like SGLang's /server_info."""

    answers: ClassVar[list[Any]] = []
    key: ClassVar[str | None] = None

    def do_GET(self) -> None:
        if self.key is not None and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send_error(401)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.answers[0]).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()
    Handler.key = None


@pytest.fixture
def file(tmp_path: Path) -> str:
    pattern_file(PATTERN, tiny_config()).save(tmp_path / "p.yaml")
    return str(tmp_path / "p.yaml")


def states(*patterns: str | None) -> dict[str, Any]:
    return {
        "internal_states": [
            {} if roles is None else {"indexcache": {"fingerprint": Pattern(roles).fingerprint}} for roles in patterns
        ]
    }


def test_servers_that_serve_the_file(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [states("FSSFSS", "FSSFSS")]
    assert main([file, "--server", server, "--server", server + "/"]) == 0
    assert capsys.readouterr().out == f"2 server(s) serve fingerprint {PATTERN.fingerprint[:16]}\n"
    assert main([file, "--server", server, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_every_rank_that_differs_is_a_problem(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [states("FSSFSS", "FFFFFF", None)]
    assert main([file, "--server", server]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert f"DP rank 1 serves fingerprint {Pattern('FFFFFF').fingerprint[:16]}" in lines[0]
    assert "DP rank 2 serves without a pattern file" in lines[1]


def test_a_server_that_is_not_proven_any_more_is_a_problem(
    server: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights were updated; what it says of that is not trusted to be one line."""
    answer = states("FSSFSS", "FSSFSS")
    answer["internal_states"][1]["indexcache"] |= {"proven": False, "since": "2026-11-26", "reason": "up\ndate\x1b[2J"}
    Handler.answers[:] = [answer]
    assert main([file, "--server", server]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"problem: {server} DP rank 1 is not proven to serve it since 2026-11-26: up date\\u001b[2J"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "internal_states: Field required"),
        ([], "Input should be an object"),
        (None, "Input should be an object"),
        ({"internal_states": []}, "internal_states: List should have at least 1 item"),
        ({"internal_states": [{"indexcache": {"fingerprint": 5}}]}, "fingerprint: Input should be a valid string"),
    ],
)
def test_answers_that_are_not_sglangs(
    server: str, file: str, answer: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.answers[:] = [answer]
    assert main([file, "--server", server]) == 2
    assert message in capsys.readouterr().err


def test_keys_and_servers_that_are_not_there(
    server: str, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.answers[:], Handler.key = [states("FSSFSS")], "secret"
    assert main([file, "--server", server]) == 2
    assert f"answers 401; expected the key in {KEY_VARIABLE}" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert main([file, "--server", server]) == 0
    for url, message in (
        ("http://127.0.0.1:9", "can't be read"),
        ("file:///etc/passwd", "expected a URL like"),
        ("http://host:abc", "expected a URL like"),
        ("http://[::1", "expected a URL like"),
        ("http://user:hunter2@127.0.0.1:9", "http://127.0.0.1:9: /server_info can't be read"),
    ):
        capsys.readouterr()
        assert main([file, "--server", url]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and "hunter2" not in error
