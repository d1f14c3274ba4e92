"""Replies of engines with and without index keys are compared where each engine repeats itself."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.bench.lab.hisparse_keys import verdict


def engine(*tokens: int, repeats: bool = True) -> dict[str, Any]:
    return {"replies": [list(tokens)], "repeats": repeats}


@pytest.mark.parametrize(
    ("engines", "exact", "said", "differs"),
    [
        ([engine(1, 2), engine(1, 2)], True, "the same tokens", False),
        ([engine(1, 2), engine(1, 3)], True, "DIFFERENT", True),
        ([engine(1, 2), engine(1, 3)], False, "DIFFERENT", True),
        ([engine(1, 2), engine(1, 2, repeats=False)], False, "not compared", False),
        ([engine(1, 2, repeats=False), engine(1, 3)], True, "not compared", True),
    ],
)
def test_replies_count_where_an_engine_repeats_itself(
    engines: list[dict[str, Any]], exact: bool, said: str, differs: bool
) -> None:
    line, failed = verdict(engines, exact)
    assert line.startswith(said) and failed == differs
    assert ("--exact" in line) == (said == "not compared" and not exact)
