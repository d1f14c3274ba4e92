"""Tables of `language_model`, from a comparison that was written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.search import language_table as tables

SOURCES = {"x/held-out-text-64.jsonl": 3, "x/held-out-recall-64.jsonl": 2, "mrcr-style": 2, "multi_key-style": 2}
OWN = [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
LOSSES = {
    "FFFF": OWN,
    "FSFF": [1.1, 2.2, 3.3, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
    "FFSS": [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "FSFS": [1.0, 2.0, 3.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two seeds, two phases, a pattern that lacks sequences; a journal in parts, with a repeat that does not count."""
    by_source = {source: {"loss": {"degrees": size - 1}} for source, size in SOURCES.items()}
    rows: list[dict[str, Any]] = [
        {"kind": kind, "name": name, "retention": "1/2", "phase": phase, "pattern": pattern, "by_source": by_source}
        for kind, name, phase, pattern in (
            ("baseline", "baseline", None, "FFFF"),
            ("named", "seed0-1of2", None, "FSFF"),
            ("named", "seed1-1of2", None, "FFSS"),
            ("named", "few-1of2", None, "FSSF"),
            ("phase", "uniform", 0, "FSFS"),
            ("phase", "uniform", 1, "FFSS"),
            ("mean", "uniform", None, None),
        )
    ]
    rows = [rows[1], rows[0], *rows[2:]]
    (tmp_path / "eval-64" / "work").mkdir(parents=True)
    (tmp_path / "eval-64" / "eval.json").write_text(json.dumps({"held_out": {"rows": rows}}))
    lines: list[dict[str, Any]] = [{"identity": {}}]
    for pattern, losses in LOSSES.items():
        for kind in ("nll", "kl"):
            for part in (range(4), range(4, 9)):
                own = [2 * losses[row] for row in part]  # of two tokens
                record = {"set": kind, "pattern": pattern, "repeat": 0, "rows": [*part], "losses": own}
                lines.append({**record, "correct": [1 for _ in part], "tokens": [2 for _ in part]})
    lines.append({**lines[1], "repeat": 1, "losses": [9.0] * 4})
    lines.append({**lines[1], "pattern": "FSSF"})
    (tmp_path / "eval-64" / "work" / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def cells(text: str, first: str) -> list[str]:
    [row] = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_rows_are_means_over_patterns_and_errors_are_over_sequences(folder: Path) -> None:
    found = tables.Measured.read(folder / "eval-64")
    assert found.lacking == ["few-1of2"]
    assert {name: list(at) for name, at in found.columns.items()} == {
        "text": [0, 1, 2],
        "recall": [3, 4],
        "keys": [7, 8],
        "MRCR-like": [5, 6],
    }
    text = tables.losses(found)
    assert cells(text, "the model's own")[1:5] == ["2.000", "0.000", "0.000", "0.000"]
    # increases 0.1, 0.2, 0.3 of one seed and none of the other: 0.05, 0.1, 0.15
    own = cells(text, "searched 1/2")
    assert own == ["2", "+0.100 ±0.029", "+0.125 ±0.125", "+0.000 ±0.000", "+0.000 ±0.000", "0.50, recall"]
    assert cells(text, "uniform 1/2, the best phase")[1] == "+0.000 ±0.000"
    assert cells(text, "uniform 1/2, the paper's phase")[1] == "+0.200 ±0.200"
    assert cells(text, "uniform 1/2, mean of 2 phases")[1] == "+0.100 ±0.100"
    assert "few" not in text and "eighth" not in text


def test_differences_are_paired_and_letters_are_named_once(folder: Path) -> None:
    found = tables.Measured.read(folder / "eval-64")
    # 0.05, 0.1, 0.15 - (0, 0, 0.3)
    assert cells(tables.differences(found), "searched 1/2 - uniform 1/2, mean of 2 phases")[0] == "+0.000 ±0.076"
    assert cells(tables.letters(found), "`FFSS`") == ["seed1-1of2"]
    assert cells(tables.divergences(found), "searched 1/2")[1] == "0.125, 50.0 %"


def test_the_table_of_a_trained_model(tmp_path: Path) -> None:
    runs = {"own": [1.0, 3.0], "untrained": [1.5, 3.1], "trained": [1.1, 3.1]}
    rows = {"text": {name: {"losses": losses} for name, losses in runs.items()}}
    path = tmp_path / "trained-64.json"
    path.write_text(json.dumps({"a/held-out-text-64.jsonl": rows["text"]}))
    text = tables.trained(path)
    assert cells(text, "all F") == ["2.000"] and cells(text, "pattern, not trained") == ["+0.300 ±0.200"]
    assert cells(text, "pattern, trained") == ["+0.100 ±0.000"]
    assert cells(text, "what training gains") == ["-0.200 ±0.200"]
