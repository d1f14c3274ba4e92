"""indexcache-check --server: do running servers serve this file?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main
from sglang_indexcache.http.client import KEY_VARIABLE
from tests.conftest import tiny_config
from tests.http_stub import Answering, HttpStub

PATTERN = Pattern("FSSFSS")


class Handler(Answering):
    """Answers like SGLang's /server_info."""

    answers: ClassVar[list[Any]] = []
    key: ClassVar[str | None] = None

    def get(self) -> None:
        if self.key is not None and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.send_error(401)
            return
        self.reply(self.answers[0])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    found = HttpStub(Handler)
    yield found.url
    found.close()
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


def problems_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("problem: ")]


SAYS = {
    "fingerprint": PATTERN.fingerprint,
    "source": "p.yaml",
    "version": "0.2.0",
    "proven": True,
    "proven_ranks": 8,
    "full_layers": 2,
    "shared_layers": 4,
    "saved_kv_bytes_per_token": 528,
    "saved_weight_bytes": 1_250_000_000,
    "prompt_score_bytes": 4_294_967_296,
    "counted": {"passes": {"extend": 3}, "longest_prompt": 2176, "to_come": ["decode"]},
    "indexer_runs": 20,
    "indexer_skips": 40,
    "of_a_newer_version": [1],
}


def test_a_calibration_server_serves_no_pattern(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [{"internal_states": [{"indexcache_calibration": True}]}]
    assert main([file, "--server", server]) == 1
    expected = f"problem: {server} is a calibration server, expected fingerprint {PATTERN.fingerprint[:16]}"
    assert problems_in(capsys.readouterr().out) == [expected]


def test_everything_a_server_says_is_a_row_of_a_table(
    server: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sharded = {**SAYS, "sharded_layers": 2, "sharded_ranks": 8, "grouped_layers": 1}
    Handler.answers[:] = [{"version": "0.5.23", "internal_states": [{"indexcache": SAYS}, {"indexcache": sharded}]}]
    assert main([file, "--server", server]) == 0
    head, first, second, *differs = capsys.readouterr().out.split("\n\n")[0].splitlines()
    cells = [" ".join(line.split()) for line in (head, first, second)]
    assert cells == [
        "server proven ranks F layers SGLang plugin sharded grouped layers saved KV saved weights runs skips"
        " counted in",
        f"{server} DP rank 0 yes 8 2 of 6 0.5.23 0.2.0 no 0 528 B/token 1.25 GB 20 40"
        " 3 extend, up to 2176 tokens, decode to come",
        f"{server} DP rank 1 yes 8 2 of 6 0.5.23 0.2.0 2 layers, 8 ranks 1 528 B/token 1.25 GB 20 40"
        " 3 extend, up to 2176 tokens, decode to come",
    ]
    assert differs == [
        f"differs: sharded: no: {server} DP rank 0; 2 layers, 8 ranks: {server} DP rank 1",
        f"differs: grouped layers: 0: {server} DP rank 0; 1: {server} DP rank 1",
    ]


def test_what_servers_say_as_json(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [{"version": "0.5.23", "internal_states": [{"indexcache": SAYS}]}]
    assert main([file, "--server", server, "--server", server, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differs"] == {} and len(found["ranks"]) == 2
    assert found["ranks"][0] == found["ranks"][1]
    said = found["ranks"][0]
    assert said["served"]["since"] is said["served"]["reason"] is None  # it is proven
    assert (said["server"], said["dp_rank"], said["sglang"]) == (server, None, "0.5.23")
    assert {name: said["served"][name] for name in SAYS if name in said["served"]} == {
        name: value for name, value in SAYS.items() if name != "of_a_newer_version"
    }


def test_a_server_that_says_little_has_a_row_and_what_differs_from_it_is_named(
    server: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.answers[:] = [{"internal_states": [{"indexcache": SAYS}, {}]}]
    assert main([file, "--server", server]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == [server, *"DP rank 1 no pattern - - - - - - - - - - -".split()]
    assert f"differs: plugin: 0.2.0: {server} DP rank 0; no pattern: {server} DP rank 1" in lines


def test_passes_of_a_dense_model_are_decode_passes(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [
        {"internal_states": [{"indexcache": {"fingerprint": PATTERN.fingerprint, "decode_passes": 7}}]}
    ]
    assert main([file, "--server", server]) == 0
    assert "7 decode passes" in capsys.readouterr().out


def test_servers_that_serve_the_file(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [states("FSSFSS", "FSSFSS")]
    assert main([file, "--server", server, "--server", server + "/"]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n2 servers serve fingerprint {PATTERN.fingerprint[:16]}\n")
    assert main([file, "--server", server]) == 0
    assert f"\n1 server serves fingerprint {PATTERN.fingerprint[:16]}\n" in capsys.readouterr().out
    assert main([file, "--server", server, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_every_rank_that_differs_is_a_problem(server: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Handler.answers[:] = [states("FSSFSS", "FFFFFF", None)]
    assert main([file, "--server", server]) == 1
    lines = problems_in(capsys.readouterr().out)
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
    [line] = problems_in(capsys.readouterr().out)
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
