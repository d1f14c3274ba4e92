"""The training passes of the demo models compute what transformers does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_search import demo
from scripts.demo_model import build_demo, deepseek_v4, glm, train_demo_model
from scripts.demo_model.recall import Batch, RecallTasks
from scripts.demo_model.train_demo_model import MIXTURE, Stage, Trainer, lengthen, train

LENGTH = 300


def random_model(architecture: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = {**architecture.demo_config(layers=6, index_topk=8), "vocab_size": 128, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("architecture", [glm, deepseek_v4], ids=["GLM-5", "DeepSeek-V4"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@torch.no_grad()
def test_passes_are_those_of_transformers(architecture: Any, sparse: bool) -> None:
    model = random_model(architecture, **({} if sparse else {"index_topk": LENGTH}))
    tokens = torch.randint(3, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=tokens, use_cache=False).logits
    x, tables = architecture.embed(model, tokens), architecture.positions(model, LENGTH, tokens.device)
    divergences = []
    for layer in model.model.layers:
        if sparse:
            x, divergence = architecture.sparse_layer(layer, x, tables, 8)
        else:
            warmed, divergence = architecture.warmup_layer(layer, x, tables)
            x = architecture.dense_layer(layer, x, tables)
            assert torch.allclose(warmed, x, atol=1e-4)
        divergences.append(divergence.item())
    logits = model.lm_head(architecture.final(model, x))
    assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4)
    indexed = [
        getattr(item.self_attn, "indexer", None) or getattr(item.self_attn, "compressor", None)
        for item in model.model.layers
    ]
    for divergence, module in zip(divergences, indexed, strict=True):
        chooses = module is not None and (architecture is glm or hasattr(module, "indexer"))
        assert (divergence > 1e-4) == chooses


def write_corpus(folder: Path) -> None:
    generator = np.random.default_rng(0)
    streams = {part: generator.integers(0, 200, 40_000).astype(np.uint16) for part in ("train", "evaluation")}
    np.savez(folder / "corpus.npz", words=np.arange(100, 164), **streams)


@pytest.mark.slow
def test_longer_sequences_go_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model goes on from its weights, and what is computed again for the gradient is the same."""
    write_corpus(tmp_path)
    config = {**glm.demo_config(layers=2, index_topk=8), "vocab_size": 512}
    first = Trainer(glm, tmp_path, tmp_path / "base", 0, config, False)
    first.tasks = RecallTasks(first.streams["train"], first.words, 0)
    batch, rope = first.tasks.drawn(MIXTURE, 3, 130), first._rope(129)
    gradients = []
    for trained in (1024, 100):
        monkeypatch.setattr(train_demo_model, "TRAINED", trained)
        first.model.zero_grad()
        first.sparse_step(batch, rope)
        gradients.append(
            {name: item.grad.clone() for name, item in first.model.named_parameters() if item.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    assert all(torch.allclose(item, gradients[1][name], atol=1e-6) for name, item in gradients[0].items())

    first.save()
    monkeypatch.setattr(train_demo_model, "Stage", lambda name, steps, batch, length, warmup=1: Stage(name, 2, 2, 130))
    monkeypatch.setattr(Trainer, "evaluate", lambda self, name, sparse, sequences, length: None)
    base = {
        name: item.clone() for name, item in AutoModelForCausalLM.from_pretrained(first.output).state_dict().items()
    }
    second = Trainer(glm, tmp_path, tmp_path / "longer", 1, config, False)
    lengthen(second, tmp_path / "base", 4096, 0.001)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "longer").state_dict()
    far = [(found[name].float() - item.float()).abs().max().item() for name, item in base.items()]
    assert 0 < max(far) < 0.1


def test_small_batches_have_all_tasks(tmp_path: Path) -> None:
    tasks = RecallTasks(torch.arange(40_000) % 200, torch.arange(100, 164), 0)
    seen: list[str] = []
    tasks.sample = lambda task, batch, length: seen.append(task) or Batch(torch.zeros(1, 9), torch.zeros(1, 9))  # type: ignore
    for _ in range(500):
        assert len(tasks.drawn(MIXTURE, 4, 9).tokens) == 4
    for task, share in MIXTURE.items():
        assert abs(seen.count(task) / len(seen) - share) < 0.03


def test_data_of_any_length(tmp_path: Path) -> None:
    """What `build_demo --data` writes, searches read."""
    write_corpus(tmp_path)
    arrays = dict(np.load(tmp_path / "corpus.npz"))
    np.savez(tmp_path / "corpus.npz", **arrays, calibration=arrays["train"])
    for name in ("calibration", "evaluation"):
        lines = [json.dumps({"text": f"{name} {number} " * 50}) for number in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = build_demo.set_aside(tmp_path)
    build_demo.write_data(tmp_path, sources, tmp_path / "data", 200, 3, {"calibration": 3000, "evaluation": 2000})
    rows = [json.loads(line) for line in (tmp_path / "data" / "calibration-recall.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * len(demo.RECALL_TASKS) and all(len(row["input_ids"]) == 200 for row in rows)
    assert all(0 < sum(row["loss_mask"]) < 200 for row in rows)
    names = {name.removeprefix("demo:") for name in (*demo.CALIBRATION, *demo.EVALUATION)}
    assert {path.stem for path in (tmp_path / "data").glob("*.jsonl")} == names


@pytest.mark.slow
def test_training_goes_on_behind_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same weights; what is left of a run that was killed is a whole stage, or nothing."""
    write_corpus(tmp_path)
    config = {**glm.demo_config(layers=2, index_topk=8), "vocab_size": 512, "hidden_size": 64}
    monkeypatch.setattr(train_demo_model, "Stage", lambda name, steps, batch, length, warmup=1: Stage(name, 2, 2, 160))
    monkeypatch.setattr(Trainer, "evaluate", lambda self, name, sparse: None)

    def trained(name: str) -> dict[str, torch.Tensor]:
        trainer = Trainer(glm, tmp_path, tmp_path / name, 0, config, False)
        train(trainer, 0.001)
        return trainer.model.state_dict()

    whole = trained("whole")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "whole" / "0-dense.pt", tmp_path / "again")
    again = trained("again")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert sorted(path.name for path in (tmp_path / "again").glob("*.pt")) == [
        "0-dense.pt",
        "1-warmup.pt",
        "2-sparse.pt",
    ]
