"""The table of a larger model: which commands run when, and what the table says of their results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.search import scale
from scripts.bench.search.scale import BASE, DENSE, Plan, Row, Step, recovered, run, table
from sglang_indexcache import Pattern

OPTIONS = {"seeds": [0, 1], "gpus": 1, "length": 96, "batch_size": 2, "warmup_steps": 1, "steps": 2, "micro_batch": 1}
RATES = {"lr": 1e-4, "indexer_lr": 1e-3, "warmup_pace": 1.0, "sparse_pace": 2.0, "search_seconds": 5.0}
SIZES = {"index_heads": 4, "index_dim": 64, "index_topk": 16, "dense_seconds": 9.0, "dense": "--workers 0"}


def plan(folder: Path) -> Plan:
    return Plan(argparse.Namespace(output=folder, corpus=folder / "corpus", **OPTIONS, **RATES, **SIZES))


def touching(name: str, folder: Path, needs: str | None = None, code: int = 0) -> Step:
    line = f"import pathlib, sys; pathlib.Path({str(folder / name)!r}).touch(); sys.exit({code})"
    return Step(name, [sys.executable, "-c", line], folder / name, 1.0, None if needs is None else folder / needs)


def test_steps_wait_for_what_they_need_and_are_not_done_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [touching("third", tmp_path, "second"), touching("second", tmp_path, "first"), touching("first", tmp_path)]
    run(steps, 2, 1, tmp_path / "logs")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "exit code 0" in line] == ["first", "second", "third"]
    run(steps, 2, 1, tmp_path / "logs")
    assert capsys.readouterr().out == ""


def test_after_a_failure_nothing_starts(tmp_path: Path) -> None:
    steps = [touching("bad", tmp_path / "missing"), touching("later", tmp_path)]
    with pytest.raises(SystemExit, match=r"bad failed, see .*bad\.log"):
        run(steps, 1, 1, tmp_path / "logs")
    assert not (tmp_path / "later").exists() and "FileNotFoundError" in (tmp_path / "logs" / "bad.log").read_text()
    with pytest.raises(SystemExit, match=r"orphan: .*nothing is missing"):
        run([touching("orphan", tmp_path, "nothing")], 1, 1, tmp_path / "logs")


def test_commands_are_those_of_the_package(tmp_path: Path) -> None:
    steps = {step.name: step for step in plan(tmp_path).training_steps()}
    assert list(steps) == [
        "searched",
        *("control-0", "uniform-0", "own-0"),
        *("control-1", "uniform-1", "own-1", "searched-1"),
    ]
    first = " ".join(steps["searched"].command)
    assert f"--model {tmp_path / 'dense'} --search-first 1/4 --index-heads=4 --index-dim=64 --index-topk=16" in first
    own = " ".join(steps["own-1"].command)
    assert "--pattern uniform@1/4 --loss own" in own and "--seed 1" in own
    assert "--loss" not in " ".join(steps["uniform-1"].command)
    assert f"{tmp_path / 'searched' / 'search' / 'pattern.yaml'}@1/4" in steps["searched-1"].command
    base = tmp_path / "searched" / "all-layers"
    assert all(str(base / "model") in step.command for name, step in steps.items() if name != "searched")
    assert steps["uniform-0"].needs == base / "metrics.json" and steps["uniform-0"].seconds == 35
    alone = plan(tmp_path).dense_step()
    assert alone.command[1:3] == ["-m", "scripts.demo_model.train_dense_mla"] and alone.command[-2:] == [
        "--workers",
        "0",
    ]
    both = Plan(argparse.Namespace(**{**vars(plan(tmp_path).options), "gpus": 2})).dense_step()
    assert both.command[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def test_rows_have_their_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "searched" / "search"
    folder.mkdir(parents=True)
    rows = [{"name": "similarity", "pattern": "FFSSSFSF"}, {"name": "lazy", "pattern": "FSFSFSFS"}]
    (folder / "metrics.json").write_text(json.dumps({"held_out": {"rows": rows}}))
    made = plan(tmp_path)
    found = {(row.name, row.seed): row for row in made.rows(8)}
    patterns = {name: str(made.pattern(row, 8)) for name, row in found.items() if row.pattern != "searched"}
    assert patterns["similarity 1/4, training-free", None] == "FFSSSFSF"
    assert (
        patterns["uniform 1/4, trained", 1]
        == patterns["uniform 1/4, training-free", None]
        == str(Pattern.uniform(8, 4))
    )
    assert patterns[f"{BASE}, trained as long", 0] == patterns[DENSE, None] == "F" * 8
    assert found["searched 1/4, trained", 0].model == tmp_path / "searched" / "trained" / "model"
    assert found["searched 1/4, trained", 1].model == tmp_path / "searched-1" / "model"


def results(**losses: tuple[int | None, float]) -> list[dict[str, object]]:
    """Two sequences of text and one of a task, whose last has no scored token; sums of losses over 10 tokens each."""
    return [
        {"row": name.rstrip("_"), "seed": seed, "losses": [10 * loss, 30 * loss, 50 * loss, 0.0],
         "correct": [5, 5, 9, 0], "tokens": [10, 10, 10, 0]}
        for name, (seed, loss) in losses.items()
    ]  # fmt: skip


GROUPS = {"text": np.array([0, 1]), "RULER-like": np.array([2, 3])}


def test_the_table_pairs_sequences_and_averages_seeds(tmp_path: Path) -> None:
    items = [*results(base=(None, 1.0), free=(None, 1.5)), *results(trained=(0, 1.1)), *results(trained=(1, 1.3))]
    rows = [
        Row("base", tmp_path, "F", "base"),
        Row("free", tmp_path, "F", "base"),
        Row("trained", tmp_path, "F", "base"),
    ]
    groups = {"text": GROUPS["text"], "RULER-like": np.array([0, 1])}
    lines = table(items, [*rows, Row("not there", tmp_path, "F", "base")], groups).splitlines()
    assert lines[0] == "| | seeds | text loss | RULER-like loss | RULER-like right |"
    assert lines[1].count("|") == lines[0].count("|")
    assert lines[2] == "| base | 1 | 2.0000 | 2.0000 | 50.0% |"
    # Differences of 0.2 and 0.6, the means over two seeds: 0.4, with a standard error of 0.2.
    assert lines[4].startswith("| trained | 2 | 2.4000 (+0.4000 ±0.2000) |") and len(lines) == 5


def test_the_share_recovered_is_relative_to_the_model_trained_as_long() -> None:
    items = results(**{
        BASE: (None, 1.0), "uniform 1/4, training-free": (None, 1.5), f"{BASE}, trained as long": (0, 1.0),
        "uniform 1/4, trained": (0, 1.05), "uniform 1/4, trained, own layer's loss": (0, 1.25),
    })  # fmt: skip
    lines = recovered(items, {"text": GROUPS["text"]}).splitlines()
    assert lines[0] == "uniform 1/4, trained, text: 90% of +1.0000 recovered (by seed: 90%)"
    assert lines[1].startswith("uniform 1/4, trained, own layer's loss, text: 50%")


def test_sequences_without_scored_tokens_do_not_count() -> None:
    assert scale.means(results(base=(None, 1.0)), "base", "correct", GROUPS["RULER-like"]).tolist() == [[0.9]]
