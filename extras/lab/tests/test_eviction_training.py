"""How NOSA's eviction heads train, resume and are refused, and how a model has them afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from extras.lab.tests.evicting import EVERY
from indexcache_lab.cli import app
from indexcache_lab.eviction.heads import FILE, attach_saved
from indexcache_lab.eviction.task import EvictionTask
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from sglang_indexcache import PatternFile
from sglang_indexcache.checkpoint.checkpoint import weights_digest
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import LAYERS, VOCAB, random_tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = np.random.default_rng(2).integers(3, VOCAB, (40, 96)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


PAGES = "page_tokens=32,pages=3,recent_pages=2,sink_pages=0"
OPTIONS = ["--seq-len", 160, "--num-sequences", 8, "--num-eval-sequences", 2, "--steps", 4, "--batch-size", 2,
           "--every", "checkpoint=2,evaluate=2,show=1", "--ramp-steps", 1, "--device", "cpu"]  # fmt: skip
HEADS = "query_pages=1"


def train(model: Path, data: Path, output: Path, *more: Any) -> tuple[int, str]:
    words = [
        "eviction",
        "--model",
        model,
        "--training",
        data,
        "--output",
        output,
        *OPTIONS,
        *(() if "--heads" in more else ("--heads", HEADS)),
        *(() if "--selection" in more else ("--selection", PAGES)),
        *more,
    ]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def log(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "check")} for line in lines]


@pytest.fixture(scope="module")
def trained(dense_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "out"
    code, text = train(dense_folder, texts, output, "--heads", f"{HEADS},lr=0.1")
    assert code == 0, text
    assert "eviction heads: KL" in text and "norms of values" in text and "more than attending to" in text
    return output


def test_heads_alone(trained: Path, dense_folder: Path) -> None:
    """The body stays, the heads have learnt, and engines take them with the plan."""
    assert (trained / "model" / "model.safetensors").read_bytes() == (dense_folder / "model.safetensors").read_bytes()
    assert weights_digest(str(trained / "model")) != weights_digest(str(dense_folder))
    rows = json.loads((trained / "metrics.json").read_text())["rows"]
    plans = ["original", "best by query", "norms of values", "eviction", "eviction"]
    assert [row["stage"] for row in rows] == plans and [row["step"] for row in rows] == [0, 0, 0, 2, 4]
    assert rows[0]["kl"] == 0 and all(row["kl"] > 0 for row in rows[1:])
    file = PatternFile.load(trained / "pattern.yaml")
    plan = file.as_pattern()
    assert plan.roles == EVERY and str(plan.selection) == "32|3|2|0|compressed_keys|nosa:1:heads|"
    tensors = load_file(trained / "model" / FILE)
    assert bool(tensors["scale"].any()) and tensors["weight"].shape == (LAYERS, 2, 32)
    engine = TransformersEngine.load(str(trained / "model"), "cpu", selection=plan.selection)
    attach_saved(engine)
    [found] = engine.evaluate([plan], random_tokens(2, 160, first_sparse_position=100), "kl")
    assert min(found.losses) > 0
    stranger = TransformersEngine.load(str(dense_folder), "cpu", selection=plan.selection)
    attach_saved(stranger)
    with pytest.raises(SearchError, match="the plan asks for trained heads"):
        list(stranger.evaluate([plan], random_tokens(2, 160, first_sparse_position=100), "nll"))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--body", "lr=1e-3"], marks=pytest.mark.slow),
        ["--selection", f"{PAGES},heads=key"],
        pytest.param(["--heads", f"{HEADS},detach=yes", "--body", "lr=1e-3"], marks=pytest.mark.slow),
        ["--engine", "gradient_checkpointing=no", "--heads", f"{HEADS},bias=training", "--body", "lr=1e-3"],
    ],
)
def test_a_killed_run_goes_on_exactly(
    more: list[str], dense_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(dense_folder, texts, whole, *more)[0] == 0
    real = EvictionTask.step

    def step(task: EvictionTask, number: int) -> dict[str, Any]:
        if number == 3:
            raise KeyboardInterrupt
        return real(task, number)

    with monkeypatch.context() as patch:
        patch.setattr(EvictionTask, "step", step)
        assert train(dense_folder, texts, killed, *more)[0] == 130
    assert not (killed / "model").exists()
    code, text = train(dense_folder, texts, killed, *more)
    assert code == 0, text
    assert log(killed) == log(whole)
    for name in ("model.safetensors", str(FILE)):
        mine, theirs = (load_file(output / "model" / name) for output in (killed, whole))
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    before = load_file(dense_folder / "model.safetensors")
    after = load_file(whole / "model" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before) == ("--body" not in more)
    metrics = json.loads((killed / "metrics.json").read_text())
    code, text = train(dense_folder, texts, killed, *more)
    assert code == 0 and json.loads((killed / "metrics.json").read_text())["rows"] == metrics["rows"]


def test_variants_are_other_runs(dense_folder: Path, texts: Path, tmp_path: Path, trained: Path) -> None:
    """Key heads that choose for themselves, and values without a gradient; both are said where they are looked for."""
    found = {}
    for name, more in (
        ("key", ["--heads", f"{HEADS},lr=0.1", "--selection", f"{PAGES},heads=key"]),
        ("detach", ["--heads", f"{HEADS},lr=0.1,detach=yes"]),
    ):
        code, text = train(dense_folder, texts, tmp_path / name, *more)
        assert code == 0, text
        found[name] = load_file(tmp_path / name / "model" / FILE)
        assert json.loads((tmp_path / name / "metrics.json").read_text())["settings"]["detach"] == (name == "detach")
    mine = load_file(trained / "model" / FILE)
    for other in found.values():
        assert not torch.equal(other["weight"], mine["weight"])
    plan = PatternFile.load(tmp_path / "key" / "pattern.yaml").as_pattern()
    assert str(plan.selection) == "32|3|2|0|compressed_keys|nosa:1:heads||key"
    code, text = train(dense_folder, texts, tmp_path / "key")
    assert code == 2 and "belongs to a run with" in " ".join(text.split())


def test_gradient_checkpointing_changes_nothing(dense_folder: Path, texts: Path, tmp_path: Path, trained: Path) -> None:
    assert (
        train(dense_folder, texts, tmp_path, "--heads", f"{HEADS},lr=0.1", "--engine", "gradient_checkpointing=no")[0]
        == 0
    )
    mine, theirs = (load_file(output / "model" / FILE) for output in (tmp_path, trained))
    for key in theirs:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-4, atol=1e-5)


def test_losses_that_are_no_numbers_end_it(
    dense_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EvictionTask._losses

    def losses(task: EvictionTask, *args: Any) -> Tensor:
        found = real(task, *args)
        return found * torch.nan if task.optimizer.state else found  # from the second step on

    monkeypatch.setattr(EvictionTask, "_losses", losses)
    code, text = train(dense_folder, texts, tmp_path)
    assert code == 1 and "step 2: loss nan" in text and "there is no checkpoint yet" in text
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pattern", "FSFSFS"], "--pattern is FSFSFS, expected D and F"),
        (["--pattern", "DDDDDD"], "--pattern is DDDDDD, expected D and F"),
        (["--pattern", "FFF"], OTHER_LENGTH.format(3, 6)),
        (["--steps", 0], "--steps is 0, expected at least one step"),
        (["--loss", "own"], "No such option: --loss"),
        (["--warmup-steps", 3], "No such option: --warmup-steps"),
        (["--lr", 0.2], "No such option: --lr; expected --heads lr=VALUE"),
        (["--selection", f"{PAGES},heads=all"], "heads: found 'all', expected one of joint, key"),
        (["--detach"], "No such option: --detach; expected --heads detach=VALUE"),
        (
            ["--selection", "page_tokens=16,pages=3,recent_pages=2,sink_pages=0"],
            "nosa with page_tokens 16 and recent_pages 2, expected at least 32 and 2",
        ),
        (["--heads", "query_pages=2"], "query_pages is 2, expected at most 1"),
        (["--seq-len", 97], "--seq-len is 97, but queries see every token up to position 96"),
        (["--batch-size", 3, "--engine", "micro_batch=2"], "--batch-size is 3, expected a multiple of micro_batch"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    more: list[Any], message: str, dense_folder: Path, texts: Path, tmp_path: Path
) -> None:
    code, text = train(dense_folder, texts, tmp_path, *more)
    assert code == 2 and message in " ".join(text.split()), text


def test_what_is_trained_lies_apart_and_stays_the_same(dense_folder: Path, texts: Path, tmp_path: Path) -> None:
    """An output in the model's folder would be copied into itself; other data under the same name are another run."""
    model = shutil.copytree(dense_folder, tmp_path / "model")
    (model / "loop").symlink_to(tmp_path)
    before = sorted(path.relative_to(model) for path in model.rglob("*"))
    for output in (model / "out", model, tmp_path, model / "loop"):
        code, text = train(model, texts, output)
        assert code == 2 and "what is read and what is written overlap" in " ".join(text.split()), text
    assert sorted(path.relative_to(model) for path in model.rglob("*")) == before
    data = shutil.copy(texts, tmp_path / "texts.jsonl")
    assert train(model, data, tmp_path / "out")[0] == 0
    found = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert FILE.parent.name in found and "loop" not in found
    data.write_text(data.read_text().replace("[", "[5, ", 1))
    code, text = train(model, data, tmp_path / "out")
    assert code == 2 and f"belongs to a run with sha256 of {data}" in " ".join(text.split())


def test_models_with_indexers_are_refused(model_folder: Path, texts: Path, tmp_path: Path) -> None:
    code, text = train(model_folder, texts, tmp_path / "out")
    assert code == 2 and "has indexers that choose, expected a dense model" in " ".join(text.split())
