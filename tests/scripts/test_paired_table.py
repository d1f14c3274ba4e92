"""Patterns of one journal beside each other, paired by sequence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from indexcache_dense.selection import DEFAULT
from indexcache_search.evaluation.identity import today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluation
from scripts.tools import paired_table
from sglang_indexcache import Pattern

TOKENS = 10
LOSSES = {  # nats a token of four sequences, the last two of the last source: nll, kl
    "DDDD": ((1, 1, 2, 2), (0, 0, 0, 0)),
    "DSDS": ((1.5, 1.5, 2.5, 2.5), (0.25, 0.25, 0.75, 0.75)),
    "DSSS": ((2, 2, 3, 3), (0.5, 0.5, 1, 1)),
}


def write(folder: Path, *patterns: Pattern) -> None:
    """Write what indexcache-eval leaves of patterns, as far as the table reads it."""
    with Journal(folder / "work", {}, today()) as journal:
        for pattern in patterns:
            for part, values in zip(("nll", "kl"), LOSSES[pattern.roles], strict=True):
                columns = {"tokens": (TOKENS,) * 4, "layer_tokens": (40,) * 4, "correct": (5,) * 4}
                losses = tuple(TOKENS * value for value in values)
                journal.add_evaluation(
                    part, Evaluation(pattern=pattern, rows=(0, 1, 2, 3), losses=losses, seconds=1.0, **columns)
                )
    (folder / "eval.json").write_text(json.dumps({"held_out": {"sources": ["text", "recall"], "sequences": 4}}))


def test_a_row_for_each_pattern_and_number_of_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = replace(DEFAULT, pages=32)
    shared = [Pattern(roles, selection) for selection in (DEFAULT, few) for roles in ("DSDS", "DSSS")]
    write(tmp_path, Pattern("DDDD", DEFAULT), *shared)
    monkeypatch.setattr(sys, "argv", ["paired_table", str(tmp_path), "half=DSDS", "quarter=DSSS"])
    paired_table.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    half = ["half", "+0.500 ±0.000", "+0.500 ±0.144", "+0.750 ±0.000", "+0.250 ±0.000", ""]
    quarter = ["quarter", "+1.000 ±0.000", "+0.750 ±0.144", "+1.000 ±0.000", "+0.500 ±0.000", "+0.250 ±0.000"]
    assert rows == [[pages, *cells] for pages in ("64", "32") for cells in (half, quarter)]


def test_a_pattern_of_indexers_has_no_pages(tmp_path: Path) -> None:
    with Journal(tmp_path, {}, today()) as journal:
        values = {"losses": (3.0, 4.0), "tokens": (2, 4), "correct": (1, 1), "layer_tokens": (8, 16)}
        journal.add_evaluation("nll", Evaluation(pattern=Pattern("FSFS"), rows=(0, 1), seconds=1.0, **values))
    found = paired_table.read(journal.path, "losses")
    assert {key: losses.tolist() for key, losses in found.items()} == {("nll", Pattern("FSFS")): [1.5, 1.0]}
