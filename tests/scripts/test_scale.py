"""The table of a larger model: which commands run when, and what the table says of their results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from indexcache_search.data.reader import TokenReader
from scripts.bench.search import scale
from scripts.bench.search.scale import run
from scripts.bench.search.scale_plan import (
    EVALUATION,
    FEWEST,
    MOST,
    OVERHEAD,
    REHEARSAL,
    REHEARSED,
    Plan,
    Sizes,
    Step,
    outline,
    pace,
    sizes_for,
)
from scripts.bench.search.scale_table import (
    BASE,
    CONTROL,
    DENSE,
    OWN,
    SEARCHED,
    UNIFORM,
    Row,
    means,
    recovered,
    table,
)
from sglang_indexcache import Pattern
from tests.conftest import tiny_config
from tests.scripts.small_corpus import VOCAB, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


SMALL = ["--length", "96", "--batch-size", "2", "--warmup-steps", "1", "--steps", "2", "--micro-batch", "1"]
INDEXERS = ["--index-heads", "4", "--index-dim", "64", "--index-topk", "16"]


def options(folder: Path, *words: str) -> argparse.Namespace:
    given = ["--corpus", str(folder / "corpus"), "--output", str(folder), "--dense-seconds", "9", "--seeds", "0,1"]
    return scale.parser().parse_args([*given, *SMALL, *INDEXERS, *words])


def plan(folder: Path, *words: str) -> Plan:
    return Plan(options(folder, *words), Sizes(1, 2, [0, 1]), (1.0, 2.0))


def touching(
    name: str, folder: Path, needs: str | None = None, code: int = 0, seconds: float = 1.0, background: bool = False
) -> Step:
    line = f"import pathlib, sys; pathlib.Path({str(folder / name)!r}).touch(); sys.exit({code})"
    after = None if needs is None else folder / needs
    return Step(name, [sys.executable, "-c", line], folder / name, seconds, after, background)


def test_steps_wait_for_what_they_need_and_are_not_done_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [touching("third", tmp_path, "second"), touching("second", tmp_path, "first"), touching("first", tmp_path)]
    run(steps, 2, 1, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "exit code 0" in line] == ["first", "second", "third"]
    run(steps, 2, 1, tmp_path)
    assert capsys.readouterr().out == "" and (tmp_path / "settled").exists()


def test_after_a_failure_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [touching("bad", tmp_path / "missing"), touching("good", tmp_path), touching("orphan", tmp_path, "nothing")]
    with pytest.raises(SystemExit, match=r"bad failed, see .*bad\.log"):
        run(steps, 1, 1, tmp_path)
    assert (tmp_path / "good").exists() and not (tmp_path / "orphan").exists()
    assert "FileNotFoundError" in (tmp_path / "logs" / "bad.log").read_text()
    assert "orphan: not run, " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="orphan failed"):
        run(steps[2:], 1, 1, tmp_path)


def test_what_does_not_fit_into_the_time_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [touching("short", tmp_path, seconds=9), touching("long", tmp_path, seconds=11)]
    run(steps, 2, 1, tmp_path, lambda: 10.0)
    assert (tmp_path / "short").exists() and not (tmp_path / "long").exists()
    assert "long: not run, needs about 11 s, 10 s are left" in capsys.readouterr().out


def test_what_needs_something_for_which_there_was_no_time_has_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = touching("first", tmp_path, seconds=11)
    others = [touching("second", tmp_path, "first"), touching("third", tmp_path, "second")]
    run([first, *others], 1, 1, tmp_path, lambda: 10.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": not run, ")[0] for line in lines] == ["first", "second", "third"]
    with pytest.raises(SystemExit, match="orphan failed"):
        run([first, touching("orphan", tmp_path, "nothing")], 1, 1, tmp_path, lambda: 10.0)


def test_a_step_in_the_background_ends_once_the_others_have(tmp_path: Path) -> None:
    line = f"""import pathlib, time
folder = pathlib.Path({str(tmp_path)!r})
while not (folder / "settled").exists(): time.sleep(0.05)
(folder / "seen").write_text(str((folder / "last").exists()))"""
    evaluation = Step("evaluation", [sys.executable, "-c", line], tmp_path / "never", 99.0, background=True)
    run([evaluation, touching("first", tmp_path), touching("last", tmp_path, "first")], 1, 1, tmp_path, lambda: 10.0)
    assert (tmp_path / "seen").read_text() == "True"


def test_commands_are_those_of_the_package(tmp_path: Path) -> None:
    steps = {step.name: step for step in plan(tmp_path).training_steps()}
    assert list(steps) == [
        "searched",
        *("control-0", "uniform-0", "own-0"),
        *("control-1", "uniform-1", "own-1", "searched-1"),
    ]
    first = " ".join(steps["searched"].command)
    assert f"--model {tmp_path / 'dense'} --search-first 1/4 --index-heads=4 --index-dim=64 --index-topk=16" in first
    assert "--num-sequences 6 " in first and "--warmup steps=1,lr=1e-3 --sparse steps=2," in first
    own = " ".join(steps["own-1"].command)
    assert "--pattern uniform@1/4 --loss own" in own and "--seed 1" in own
    assert "--loss" not in " ".join(steps["uniform-1"].command)
    assert f"{tmp_path / 'searched' / 'search' / 'pattern.yaml'}@1/4" in steps["searched-1"].command
    base = tmp_path / "searched" / "all-layers"
    assert all(str(base / "model") in step.command for name, step in steps.items() if name != "searched")
    assert steps["uniform-0"].needs == base / "metrics.json" and steps["uniform-0"].seconds == OVERHEAD + 5
    alone = plan(tmp_path, "--dense", "--workers 0").dense_step()
    assert alone.command[1:3] == ["-m", "scripts.demo_model.train_dense_mla"]
    assert alone.command[-4:] == ["--batch-tokens", "65536", "--workers", "0"]
    both = plan(tmp_path, "--gpus", "2").dense_step().command
    assert both[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert both[-2:] == ["--batch-tokens", "32768"]  # the same step on both
    sizes = "--layers 24 --hidden 512 --heads 8 --passes 3.0 --tasks 0.1 --text 0.7 --longest 8192"
    assert " ".join(both[-16:-2]) == sizes
    one = plan(tmp_path, "--gpus", "2", "--dense-gpus", "1").dense_step()
    assert one.command == alone.command[:-2]


def test_indexers_train_alone_as_a_search_first_would_train_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(tmp_path)
    step, first = made.dsa_step(), made.training_steps()[0]
    assert step.result == made.base / "metrics.json" and step.seconds == OVERHEAD + 5
    alone, both = list(step.command), list(first.command)
    assert alone[alone.index("--pattern") + 1] == "uniform@1" and alone[-1] == str(made.base)
    assert both[-1] == str(made.searched)
    assert [word for word in alone[:-1] if word not in ("--pattern", "uniform@1")] == [
        word for word in both[:-1] if word not in ("--search-first", "1/4")
    ]
    ran: list[str] = []
    monkeypatch.setattr(scale, "write_data", lambda plan: ran.append("data"))
    monkeypatch.setattr(scale, "run", lambda steps, *more: ran.extend(step.name for step in steps))
    scale.work(made.options, ["dense", "dsa"], lambda: 9e9)
    assert ran == [DENSE, "data", BASE]
    assert outline(made, ["dsa"]).splitlines()[0] == f"DSA: about {OVERHEAD + 5:.0f} s"


def test_rows_are_judged_on_text_recall_and_each_task(corpus: Path, tmp_path: Path) -> None:
    few = ["--text-sequences", "2", "--samples", "2", "--held-out", "2", "--length", "1024", "--index-topk", "64"]
    made = plan(tmp_path, "--corpus", str(corpus), *few)
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, 4000))) for _ in range(8)]
    (corpus / "evaluation.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = tiny_config(layers=2, vocab_size=VOCAB, max_position_embeddings=1024, index_topk=64)
    model = made.base / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    scale.write_data(made)
    held_out = scale.evaluation_set(made)
    groups = scale.groups_of(held_out)
    assert {name: len(rows) for name, rows in groups.items()} == {
        "text": 2,
        "recall": 2,
        "MRCR-like": 2,
        "RULER-like": 8,
    }
    assert sum(map(len, groups.values())) == held_out.data.num_sequences


def test_how_long_each_part_takes_is_said(tmp_path: Path) -> None:
    made = plan(tmp_path, "--gpus", "2")
    once = OVERHEAD + 5
    lines = outline(made, ["rehearse", "dense", "train"]).splitlines()
    assert lines[:3] == [
        f"rehearsal: about {REHEARSAL:.0f} s",
        "dense: about 69 s",
        f"searched: about {2 * once + 120:.0f} s",
    ]
    assert lines[3] == f"control-0: about {once:.0f} s" and len(lines) == 3 + 7 + 2
    total = REHEARSAL + 69 + max(2 * once + 120, (9 * once + 120) / 4) + EVALUATION
    assert lines[-1] == f"all: about {total:.0f} s on 2 GPUs, 2 at once on each"
    assert outline(made, ["dense"]).splitlines()[-1].startswith("all: about 69 s")


def test_the_evaluation_runs_with_the_same_options(tmp_path: Path) -> None:
    made = plan(tmp_path, "--dense", "--workers 0 --show 1")
    command = made.evaluation_step().command
    again = scale.parser().parse_args(list(command[3:]))
    assert again == argparse.Namespace(**{**vars(made.options), "only": "evaluate", "wait": True})


def test_rows_are_ready_once_their_files_are_there(tmp_path: Path) -> None:
    made = plan(tmp_path)
    rows = {(row.name, row.seed): row for row in made.rows()}
    assert not any(map(made.is_ready, rows.values()))
    (made.base / "model").mkdir(parents=True)
    (made.base / "model" / "config.json").touch()
    (made.base / "metrics.json").touch()
    ready = [row.name for row in rows.values() if made.is_ready(row)]
    assert ready == [DENSE, BASE, "uniform 1/4, training-free"]
    made.search_result.parent.mkdir()
    similar = [{"name": "similarity", "pattern": "FFSSSFSF"}, {"name": "lazy", "pattern": "FSFSFSFS"}]
    made.search_result.write_text(json.dumps({"held_out": {"rows": similar}}))
    assert sum(map(made.is_ready, rows.values())) == 5
    (tmp_path / "own-1" / "model").mkdir(parents=True)
    (tmp_path / "own-1" / "model" / "config.json").touch()
    assert made.is_ready(rows[OWN, 1]) and not made.is_ready(rows[OWN, 0])
    patterns = {key: str(made.pattern(row, 8)) for key, row in rows.items() if row.pattern != "searched"}
    assert patterns["similarity 1/4, training-free", None] == "FFSSSFSF"
    assert patterns[UNIFORM, 1] == patterns["uniform 1/4, training-free", None] == str(Pattern.uniform(8, 4))
    assert patterns[CONTROL, 0] == patterns[DENSE, None] == "F" * 8
    assert rows[SEARCHED, 0].model == tmp_path / "searched" / "trained" / "model"
    assert rows[SEARCHED, 1].model == tmp_path / "searched-1" / "model"


def test_models_are_exported_once_and_what_a_killed_run_left_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(tmp_path, "--export-pieces", "int8")
    for folder in (made.dense, made.base / "model"):
        folder.mkdir(parents=True)
        save_file({"a": torch.ones(4, 4)}, folder / "model.safetensors")
    (tmp_path / "pieces" / "dense").mkdir(parents=True)
    (tmp_path / "pieces" / "dense" / "weights-007").touch()
    scale.export(made, "int8")
    assert {path.parent.name for path in tmp_path.glob("pieces/*/pieces.json")} == {"dense", "all-layers"}
    assert not (tmp_path / "pieces" / "dense" / "weights-007").exists()
    assert capsys.readouterr().out.count("2 files") == 2
    scale.export(made, "int8")
    assert capsys.readouterr().out == ""


def test_as_many_seeds_and_steps_as_fit() -> None:
    seeds = [0, 1, 2]
    most = Sizes(MOST // 3, MOST - MOST // 3, seeds)
    assert sizes_for(9999.0, (0.5, 0.5), seeds, 1, 2) == most
    few = Sizes(FEWEST // 3, FEWEST - FEWEST // 3, [0])
    assert sizes_for(10.0, (0.5, 0.5), seeds, 1, 2) == few
    one, two = (sizes_for(1000.0, (0.25, 0.5), seeds, gpus, 2) for gpus in (1, 2))
    assert 1 <= len(one.seeds) < len(two.seeds) == 3


def test_a_rehearsal_ends_what_would_fail_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, left_out, bad = options(tmp_path), {"similarity 1/4, training-free"}, {OWN}

    def work(small: argparse.Namespace, parts: list[str], left: object) -> None:
        assert parts == ["dense", "train"] and small.output == tmp_path / "rehearsal"
        assert (small.layers, small.warmup_steps, small.steps, small.seeds) == (REHEARSED, 2, 2, [0])
        small.output.mkdir(exist_ok=True)
        (small.output / "table.md").touch()
        rows = [
            {"row": row.name, "losses": [float("nan") if row.name in bad else 1.0], "tokens": [1]}
            for row in Plan(small, Sizes(2, 2, [0])).rows()
            if row.name not in left_out
        ]
        (small.output / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(scale, "work", work)
    with pytest.raises(SystemExit, match="rehearsal: similarity 1/4, training-free not evaluated"):
        scale.rehearse(made)
    left_out.clear()
    with pytest.raises(SystemExit, match=r"rehearsal: losses of .* own layer's loss are \[nan\], expected numbers"):
        scale.rehearse(made)
    bad.clear()
    with pytest.raises(SystemExit, match="rehearsal: its training has no pace"):
        scale.rehearse(made)
    monkeypatch.setattr(scale, "pace", lambda log: (0.25, 0.5))
    scale.rehearse(made)
    assert "rehearsal: passed" in capsys.readouterr().out
    monkeypatch.setattr(scale, "work", None)
    scale.rehearse(made)  # once is enough


def test_the_rehearsals_pace_and_what_was_chosen_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "rehearsal" / "searched" / "all-layers" / "log.jsonl"
    log.parent.mkdir(parents=True)
    seconds = [("original", 9.0), ("warmup", 30.0), ("warmup", 0.1), ("sparse", 20.0)]
    lines = [json.dumps({"stage": stage, "seconds": value}) + "\n" for stage, value in seconds]
    lines += [json.dumps({"stage": stage, "held_out_loss": 1.0}) + "\n" for stage in ("warmup", "sparse")]
    log.write_text("".join(lines))
    assert pace(log) is None  # its only sparse step compiled
    log.write_text("".join([*lines, json.dumps({"stage": "sparse", "seconds": 0.2}) + "\n"]))
    assert pace(log) == (0.1, 0.2)
    given = argparse.Namespace(**{**vars(options(tmp_path)), "warmup_steps": None, "steps": None, "seeds": [0, 1, 2]})
    sizes, found = scale.kept_sizes(given, lambda: 1200.0)
    assert found == pytest.approx((0.6, 1.2))  # 24 layers, the rehearsal had 4
    assert sizes == sizes_for(1200.0, found, [0, 1, 2], 1, 2)
    assert scale.kept_sizes(given, lambda: 1.0) == (sizes, found)  # the same command goes on


def test_what_is_written_is_what_is_read(corpus: Path, tmp_path: Path) -> None:
    """As many sequences come out of the reader as went in, with the same tokens counted."""
    made = plan(tmp_path, "--corpus", str(corpus), "--length", "1024", "--held-out", "4", "--text-sequences", "3")
    scale.write_data(made)
    for name, count in (("training", 80), ("held-out", 16), ("recall", 16)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        reader = TokenReader(lambda: None, VOCAB, 1024)
        sections = [section for [section] in reader.documents(str(tmp_path / f"{name}.jsonl"), 0)]
        assert len(rows) == len(sections) == count
        assert sorted(section.tokens.tolist() for section in sections) == sorted(row["input_ids"] for row in rows)
        assert reader.readings[0].counted == sum(sum(row["loss_mask"]) for row in rows) > 0
    assert (tmp_path / "recall.jsonl").read_text() != (tmp_path / "held-out.jsonl").read_text()


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
    lines = table(items, [*rows, Row("later", tmp_path, "F", "base")], groups).splitlines()
    assert lines[0] == "| | seeds | text loss | RULER-like loss | RULER-like right |"
    assert lines[1].count("|") == lines[0].count("|")
    assert lines[2] == "| base | 1 | 2.0000 | 2.0000 | 50.0% |"
    # Differences of 0.2 and 0.6, the means over two seeds: 0.4, with a standard error of 0.2.
    assert lines[4].startswith("| trained | 2 | 2.4000 (+0.4000 ±0.2000) |")
    assert lines[5] == "| later | 0 | not run | not run | not run |" and len(lines) == 6


def test_rows_of_several_seeds_are_compared_in_the_seeds_that_both_have(tmp_path: Path) -> None:
    items = [*results(uniform=(1, 1.3)), *results(control=(1, 1.2)), *results(uniform=(0, 1.5))]
    rows = [Row("control", tmp_path, "F", "control", 1), Row("uniform", tmp_path, "F", "control", 1)]
    lines = table(items, rows, {"text": GROUPS["text"]}).splitlines()
    assert lines[3].startswith("| uniform | 2 | 2.8000 (+0.2000")
    rest = [item for item in items if (item["row"], item["seed"]) != ("uniform", 1)]
    assert table(rest, rows, {"text": GROUPS["text"]}).splitlines()[3] == "| uniform | 1 | 3.0000 |"


def test_the_share_recovered_is_relative_to_the_model_trained_as_long() -> None:
    items = results(**{
        BASE: (None, 1.0), "uniform 1/4, training-free": (None, 1.5),
        CONTROL: (0, 1.0), UNIFORM: (0, 1.05), OWN: (0, 1.25),
    })  # fmt: skip
    assert recovered(items[1:], {"text": GROUPS["text"]}) == ""  # without the reference
    lines = recovered(items, {"text": GROUPS["text"]}).splitlines()
    assert lines[0] == "uniform 1/4, trained, text: 90% of +1.0000 recovered (by seed: 90%)"
    assert lines[1].startswith("uniform 1/4, trained, own layer's loss, text: 50%")


def test_sequences_without_scored_tokens_do_not_count() -> None:
    assert means(results(base=(None, 1.0)), "base", "correct", GROUPS["RULER-like"]).tolist() == [[0.9]]
