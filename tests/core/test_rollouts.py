"""examples/check_rollouts.py: a trainer and its rollout servers run one pattern, or the trainer gets one line."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from tests.conftest import tiny_config
from tests.core.test_servers import Handler
from tests.http_stub import HttpStub

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "check_rollouts.py"))
PATTERN, OTHER = Pattern("FSSFSS"), Pattern("FSFSFS")
OWN, ELSE = PATTERN.fingerprint, OTHER.fingerprint
PROVEN = {"fingerprint": OWN, "proven": True}
LOST = {"fingerprint": OWN, "proven": False, "since": "2026-11-30", "reason": "begin_weight_update was called"}


@pytest.fixture
def server() -> Iterator[str]:
    found = HttpStub(Handler)
    yield found.url
    found.close()


def said(states: list[Any]) -> dict[str, Any]:
    return {"internal_states": [{} if state is None else {"indexcache": state} for state in states]}


@pytest.mark.parametrize(
    ("states", "line"),
    [
        ([PROVEN, PROVEN], None),
        ([PROVEN, None], "DP rank 1 serves without a pattern file, expected fingerprint"),
        ([{"fingerprint": ELSE}], f"serves fingerprint {ELSE[:16]}, the pattern file has {OWN[:16]}"),
        ([LOST], "is not proven to serve it since 2026-11-30: begin_weight_update was called"),
        ([], "at least 1 item"),
    ],
)
def test_servers_are_asked_for_what_is_trained(
    states: list[Any], line: str | None, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Handler.answers[:] = [said(states)]
    pattern_file(PATTERN, tiny_config()).save(tmp_path / "p.yaml")
    code = EXAMPLE["main"]([str(tmp_path / "p.yaml"), "--server", server, "--server", server])
    shown = capsys.readouterr()
    if line is None:
        assert code == 0 and shown.out == "2 server(s) serve what is trained\n"
    else:
        [found] = shown.err.splitlines()
        assert code == 1 and found.startswith("check_rollouts: ") and line in found


def test_what_names_no_pattern_is_one_line(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("uniform@1/4", "no.yaml", "FSQ"):
        assert EXAMPLE["main"]([name, "--server", server]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def answer(named: Any, reason: str = "length") -> dict[str, Any]:
    meta = {"id": "r7", "finish_reason": {"type": reason}}
    return {"output_ids": [5], "meta_info": meta if named is None else {**meta, "indexcache": named}}


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ([answer([OWN]), answer([OWN], "stop"), answer([OWN], "abort"), answer(None, "abort")], None),
        (
            [answer([OWN]), answer([ELSE])],
            f"answer r7 is of the pattern with fingerprint {ELSE[:16]}; expected {OWN[:16]}",
        ),
        ([answer(None)], "answer r7 names no pattern: SGLang alone, or one before 0.5.20; expected"),
        ([answer([])], "answer r7: the server had no proof while it was finished"),
        ([answer([ELSE], "abort")], "answer r7 is of the pattern"),
    ],
)
def test_answers_are_of_what_is_trained(answers: list[Any], line: str | None) -> None:
    if line is None:
        EXAMPLE["check_answers"](PATTERN, answers)
        return
    with pytest.raises(EXAMPLE["RolloutError"], match=line) as caught:
        EXAMPLE["check_answers"](PATTERN, answers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("states", "line"),
    [
        ([PROVEN], None),
        ([PROVEN, None], "engine, rank 1 names no pattern"),
        ([{**PROVEN, "fingerprint": ELSE}], "engine, rank 0 is of the pattern"),
        ([LOST], "engine, rank 0 is not proven to serve it: begin_weight_update was called"),
    ],
)
def test_an_engine_of_this_process(states: list[Any], line: str | None) -> None:
    engine = SimpleNamespace(get_server_info=lambda: said(states))
    if line is None:
        EXAMPLE["check_engine"](PATTERN, engine)
        return
    with pytest.raises(EXAMPLE["RolloutError"], match=line):
        EXAMPLE["check_engine"](PATTERN, engine)
