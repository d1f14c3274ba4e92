"""The table of a language model: which searches and comparisons run, and on which rows."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_search.data.reader import TokenReader
from indexcache_train.distill.settings import IndexerSize
from scripts.bench.search import language_model, language_table
from scripts.bench.search.scale import as_dsa
from scripts.bench.search.scale_plan import Step
from scripts.demo_model.dense_model import model_config
from sglang_indexcache import Pattern
from tests.conftest import tiny_config, tiny_model
from tests.scripts.small_corpus import VOCAB, write_corpus

LAYERS, LENGTH = 3, 1024  # with room for any task


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With prose and code apart, whose tokens tell them from each other."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    arrays, rng = dict(np.load(folder / "corpus.npz")), np.random.default_rng(1)
    for place, (part, kind) in enumerate((p, k) for p in ("evaluation", "packages") for k in ("prose", "code")):
        arrays[f"{part}-{kind}"] = rng.integers(10 + 40 * place, 50 + 40 * place, 20_000).astype(np.uint16)
    for part, first in (("evaluation", 10), ("packages", 170)):  # whole, of which lookups are made of random words
        arrays[part] = rng.integers(first, first + 30, 40_000).astype(np.uint16)
    np.savez(folder / "corpus.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=4 * LENGTH, index_topk=64)
    tiny_model(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    return folder


def options(model: Path, corpus: Path, output: Path, *words: str) -> argparse.Namespace:
    given = ["--model", str(model), "--corpus", str(corpus), "--output", str(output), "--length", str(LENGTH)]
    few = ["--seeds", "0,1", "--rows", "6", "--dtype", "float32", "--samples", "2", "--search-tokens", "1"]
    return language_model.parser().parse_args([*given, *few, "--eval-tokens", "1", "--batch-size", "1", *words])


def test_rows_of_calibration_and_held_out_are_of_other_documents(model: Path, corpus: Path, tmp_path: Path) -> None:
    given = options(model, corpus, tmp_path)
    language_model.write_data(given, LENGTH)
    seen: dict[str, set[int]] = {}
    for use in ("calibration", "held-out"):
        for source in ("text", "code", "recall"):
            path = language_model.data_file(given, use, source, LENGTH)
            reader = TokenReader(lambda: None, VOCAB, LENGTH)
            sections = [section for [section] in reader.documents(str(path), 0)]
            assert len(sections) == (8 if source == "recall" else 6), "whole batches of recall"
            assert {len(section.tokens) for section in sections} == {LENGTH}
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            assert len({json.dumps(row) for row in rows}) == len(rows)
            assert all(0 < sum(row["loss_mask"]) < LENGTH for row in rows if source == "recall")
            seen[f"{use}-{source}"] = {id for row in rows for id in row["input_ids"]}
    for source, first in (("text", 10), ("code", 50)):
        assert seen[f"calibration-{source}"] <= {*range(first, first + 40)}
        assert seen[f"held-out-{source}"] <= {*range(first + 80, first + 120)}
    for use, others in (("calibration", range(170, 200)), ("held-out", range(10, 40))):
        assert not seen[f"{use}-recall"] & {*others}, "lookups are of the same packages as text and code"
    recall = [language_model.data_file(given, use, "recall", LENGTH).read_text() for use in ("calibration", "held-out")]
    assert not {*recall[0].splitlines()} & {*recall[1].splitlines()}


def test_searches_of_a_seed_follow_each_other_on_one_journal(model: Path, corpus: Path, tmp_path: Path) -> None:
    steps = {step.name: step for step in language_model.searches(options(model, corpus, tmp_path))}
    shares = language_model.TIMES
    assert list(steps) == [
        *("seed0", *(f"seed0-{share}" for share in shares)),
        *("seed1", *(f"seed1-{share}" for share in shares)),
        *("seed0-512-tokens", "seed0-2048-tokens", "samples", "tasks", "tasks-0.37", "few", "some", "algorithm1"),
    ]
    assert steps["seed0"].needs is None and steps["seed1-0.5"].needs == tmp_path / "seed1" / "pattern.yaml"
    assert steps["seed1-0.3"].needs == tmp_path / "seed1-0.37" / "pattern.yaml"
    line = " ".join(steps["seed1-0.37"].command)
    assert f"--work-dir {tmp_path / 'work-1'} " in line and "--prefill 0.37:prices=glm-5-tp8" in line
    assert "--seq-len 1024 --reply 256 --num-sequences 3 " in line and "--seed 1" in line
    assert line.count("--calibration ") == line.count("--evaluation ") == 3
    assert "--prefill" not in " ".join(steps["seed1"].command)
    assert "--strategy greedy" in " ".join(steps["algorithm1"].command)
    assert "--seq-len 2048 --reply 512 " in " ".join(steps["seed0-2048-tokens"].command)
    samples = steps.pop("samples")
    assert steps["tasks"].needs == samples.result and steps["tasks-0.37"].needs == steps["tasks"].result
    assert f"--calibration {samples.result}" in " ".join(steps["tasks-0.37"].command)
    works = {name: step.command[step.command.index("--work-dir") + 1] for name, step in steps.items()}
    assert len(set(works.values())) == 8, "one each of two seeds, two lengths, tasks, fewer sequences, Algorithm 1"
    more = language_model.searches(options(model, corpus, tmp_path, "--search-tokens", "65536"))
    asked = {s.name: s.command[s.command.index("--num-sequences") + 1] for s in more if s.name != "samples"}
    assert [asked[name] for name in ("seed0", "some", "algorithm1", "few")] == ["64", "16", "16", "8"]


def test_all_in_blocks_is_compared_even_where_no_search_ended(model: Path, corpus: Path, tmp_path: Path) -> None:
    found = language_model.patterns(options(model, corpus, tmp_path))
    assert list(found) == ["all-q2", "all-q4", "all-q8", "all-q16"]
    every = Pattern.parse(found["all-q8"])
    assert every.full_layers == (0, 1, 2) and {indexer.queries for indexer in every.indexers} == {8}
    both = language_model.comparisons(options(model, corpus, tmp_path))
    assert [step.name for step in both] == ["eval-1024", "eval-2048", "eval-1024-served"]
    assert {step.command.count("--pattern") for step in both} == {4}
    assert "--no-uniform" in both[2].command and both[2].command[both[2].command.index("--reply") + 1] == "128"


def test_what_similarity_alone_would_keep_is_compared_as_well(model: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "seed0").mkdir()
    rows = [{"name": "similarity", "retention": "1/3", "pattern": "FSS"}, {"name": "lazy", "pattern": "FFS"}]
    (tmp_path / "seed0" / "metrics.json").write_text(json.dumps({"held_out": {"rows": rows}}))
    found = language_model.patterns(options(model, corpus, tmp_path))
    assert found["similarity-1of3"] == "FSS" and len(found) == 1 + len(language_model.BLOCKS)


def test_what_searches_found_later_is_compared_later(model: Path, corpus: Path, tmp_path: Path) -> None:
    given, folder = options(model, corpus, tmp_path), tmp_path / "eval-1024"
    folder.mkdir()
    for names, kept in (([f"all-q{size}" for size in language_model.BLOCKS], True), (["all-q2"], False)):
        rows = [{"name": name} for name in names]
        (folder / "eval.json").write_text(json.dumps({"held_out": {"rows": rows}}))
        [step, *_] = language_model.comparisons(given)
        language_model.forget_old(step)
        assert step.result.exists() == kept


def test_what_ended_is_compared_where_a_search_fails_or_does_not_fit(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(steps: Sequence[Step], *more: object) -> None:
        ran.append([step.name for step in steps])
        if len(ran) == 1:
            raise SystemExit("seed0 failed")

    monkeypatch.setattr(language_model, "run", run)
    with pytest.raises(SystemExit, match="seed0 failed"):
        language_model.main(options(model, corpus, tmp_path))
    assert "seed0" in ran[0] and ran[1:] == [["eval-1024", "eval-2048", "eval-1024-served"]]


def test_other_models_are_compared_on_the_same_sequences(corpus: Path, tmp_path: Path) -> None:
    dense, dsa, trained = tmp_path / "dense", tmp_path / "dsa", tmp_path / "trained"
    config = {**model_config(2, 64, 2, VOCAB), "q_lora_rank": 32, "max_position_embeddings": 4 * LENGTH}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(dense)
    for name, text in (
        ("config.json", json.dumps(config)),
        ("tokenizer.json", (corpus / "tokenizer.json").read_text()),
    ):
        (dense / name).write_text(text)
    as_dsa(dense, IndexerSize(heads=2, dim=64, topk=64), dsa)
    shutil.copytree(dsa, trained)
    changed = json.loads((trained / "config.json").read_text()) | {"index_topk_pattern": "FS"}
    (trained / "config.json").write_text(json.dumps(changed))
    words = ("--dense", str(dense), "--trained", str(trained), "--eval-tokens", str(9 * LENGTH))
    given = options(dsa, corpus, tmp_path / "out", *words)
    language_model.write_data(given, LENGTH)
    language_model.compare_models(given, LENGTH)
    for kind, first, last in (("dense", "dense", "DSA"), ("trained", "own", "trained")):
        rows = json.loads((tmp_path / "out" / f"{kind}-{LENGTH}.json").read_text())
        assert len(rows) == 3 + len(language_model.TASK_NAMES)
        for row in rows.values():
            assert row[last]["increase"] == pytest.approx(row[last]["loss"] - row[first]["loss"])
            assert 0 < row[last]["error"] < 1 and row[first]["increase"] == row[first]["error"] == 0
            assert row[first]["loss"] == pytest.approx(math.log(VOCAB), abs=0.5), "untrained"
            assert row[last]["loss"] == pytest.approx(np.mean(row[last]["losses"]))
            if kind == "trained":  # it was not: the weights are the same
                assert row["trained"] == row["untrained"]
    given.dense = given.trained = None
    language_model.compare_models(given, LENGTH)  # nothing is read


@pytest.mark.slow
def test_a_whole_run(model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the same command again, which has nothing left to do."""
    given = options(model, corpus, tmp_path, "--seeds", "0", "--at-once", "1", "--search-tokens", str(4 * LENGTH))
    language_model.main(given)
    served = language_table.Measured.read(tmp_path / f"eval-{LENGTH}-served")
    assert not served.lacking and {"all F, q16", "within 0.37, tasks in the calibration"} <= served.groups().keys()
    for length in (LENGTH, 2 * LENGTH):
        rows = json.loads((tmp_path / f"eval-{length}" / "eval.json").read_text())["held_out"]["rows"]
        names = {row["name"] for row in rows}
        assert {
            "seed0-1of2",
            "seed0-0.37",
            "algorithm1-1of4",
            "similarity-1of2",
            "seed0-2048-tokens-1of8",
            "tasks-0.37",
            "all-q16",
        } <= names
        found = language_table.Measured.read(tmp_path / f"eval-{length}")
        assert not found.lacking and {"searched 1/4", "blocks, searched within 0.3"} <= found.groups().keys()
    assert "exit code 0" in capsys.readouterr().out
    language_model.main(given)
    assert "exit code" not in capsys.readouterr().out
