"""Variables that switch something on say 1 or 0: what is asked for in another way is not passed over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_indexcache.io.refusal import (
    ALLOW_MISMATCH_VARIABLE,
    CALIBRATE_VARIABLE,
    GROUPING_VARIABLE,
    PATTERN_VARIABLE,
    SHARD_VARIABLE,
    UNION_VARIABLE,
)
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.request import carried, wanted
from sglang_indexcache.sglang.asked import environment_asks
from sglang_indexcache.sglang.requested import Request, amend, request_of


def requested(server_args: SimpleNamespace) -> Request:
    request = request_of(server_args)
    assert request is not None
    return request


@pytest.mark.parametrize("value", ["true", '"1"', "yes", " 1"])
@pytest.mark.parametrize(
    "variable", [CALIBRATE_VARIABLE, ALLOW_MISMATCH_VARIABLE, SHARD_VARIABLE, UNION_VARIABLE, GROUPING_VARIABLE]
)
def test_other_values_end_the_process(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if variable in (ALLOW_MISMATCH_VARIABLE, GROUPING_VARIABLE):  # they say how a pattern is served
        monkeypatch.setenv(PATTERN_VARIABLE, "p.yaml")
    monkeypatch.setenv(variable, value)
    assert environment_asks()
    with pytest.raises(SystemExit) as caught:
        request_of(SimpleNamespace())
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"indexcache: {variable} is {value!r}, expected 1 or 0\n"


def test_one_and_nothing_are_meant_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(CALIBRATE_VARIABLE, value)
        assert not environment_asks() and request_of(SimpleNamespace()) is None
    monkeypatch.setenv(CALIBRATE_VARIABLE, "1")
    assert environment_asks() and requested(SimpleNamespace()).asked.calibrate


@pytest.mark.parametrize(("variable", "name"), [(SHARD_VARIABLE, "shard"), (UNION_VARIABLE, "unions")])
def test_what_is_served_with_a_pattern_or_alone(
    variable: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the process that is told, and in those that get its server arguments."""
    monkeypatch.setenv(variable, "1")
    assert environment_asks()
    for spec, pattern in ((None, None), ("FSSF", Pattern("FSSF"))):
        if spec is not None:
            monkeypatch.setenv(PATTERN_VARIABLE, spec)
        arguments = SimpleNamespace()
        for _ in range(2):
            request = requested(arguments)
            found = wanted(request)
            assert (found and found.known(), getattr(request.asked, name)) == (pattern, True)
            amend(arguments, carried=carried(found))
    monkeypatch.delenv(variable)
    assert not requested(SimpleNamespace()).asked.without_pattern
    monkeypatch.delenv(PATTERN_VARIABLE)
    for given in (variable, CALIBRATE_VARIABLE):
        monkeypatch.setenv(given, "1")
    with pytest.raises(SystemExit):
        request_of(SimpleNamespace())
    assert "are set, expected one of them" in capsys.readouterr().err


def test_queries_of_blocks_are_attended_from_together_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that is told, and in those that get its server arguments; alone the variable asks for nothing."""
    monkeypatch.setenv(GROUPING_VARIABLE, "1")
    assert not environment_asks() and request_of(SimpleNamespace()) is None
    monkeypatch.setenv(PATTERN_VARIABLE, "FSSF")
    for value, grouped in (("1", False), ("0", True), ("", True)):
        monkeypatch.setenv(GROUPING_VARIABLE, value)
        request = requested(SimpleNamespace())
        monkeypatch.setenv(GROUPING_VARIABLE, "1")
        assert request.asked.ungrouped != grouped
