"""The table of plans beside each other says what was counted and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from indexcache_lab.offload import cli
from scripts.tools.paired_offload import rows

OPTIONS = ["--seq-len", "32", "--num-sequences", "4", "--decode-steps", "8", "--selection",
           "pages=3,page_tokens=4,recent_pages=1,steps=none/refresh:8", "--pattern", "FFFFFF", "--buffers", "1,2",
           "--device", "cpu"]  # fmt: skip


def test_a_row_a_plan(dense_folder: Path, token_file: Path, tmp_path: Path) -> None:
    given = ["--model", str(dense_folder), "--evaluation", str(token_file), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(cli.app, [*given, *OPTIONS])
    assert done.exit_code == 0, done.output
    plans = json.loads((tmp_path / "out" / "offload.json").read_text())["plans"]
    baseline, *table = rows([tmp_path / "out"], last_sequences=1)
    assert [row[0] for row in (baseline, *table)] == [plan["name"] for plan in plans]
    assert baseline[1] == baseline[2] == "+0.000 ±0.000" and len(baseline) == 6
    assert [bool(row[3]) for row in table] == [False, True]
    for plan, row in zip(plans[1:], table, strict=True):
        assert float(row[1].partition(" ")[0]) == pytest.approx(plan["loss"]["mean"], abs=6e-4)
        assert float(row[2].partition(" ")[0]) == pytest.approx(plan["kl"]["mean"], abs=6e-4)
        for cell, buffer in zip(row[6:], plan["buffers"], strict=True):
            assert float(cell) == pytest.approx(buffer["exposed"]["mean"] + buffer["hidden"]["mean"], abs=0.06)


def test_several_folders_are_one_table_of_the_same_sequences(
    dense_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    given = ["--model", str(dense_folder), "--evaluation", str(token_file), *OPTIONS]
    for name, more in (
        ("one", []),
        ("other", ["--selection", "pages=4,page_tokens=4"]),
        ("fewer", ["--num-sequences", "3"]),
    ):
        done = CliRunner().invoke(cli.app, [*given, *more, "--output", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
    one, other = ([*rows([tmp_path / name], 1)] for name in ("one", "other"))
    both = list(rows([tmp_path / "one", tmp_path / "other"], 1))
    assert [row[:3] + row[4:] for row in both] == [row[:3] + row[4:] for row in (*one, *other[1:])]
    assert [bool(row[3]) for row in both] == [False, False, True, True]
    with pytest.raises(SystemExit, match="fewer: the losses of baseline are not those of"):
        list(rows([tmp_path / "one", tmp_path / "fewer"], 1))
