"""The training passes of the demo models compute what transformers does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts import train_demo_model
from scripts.demo_model import deepseek_v4, glm
from scripts.train_demo_model import Stage, Trainer, train

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


def test_training_goes_on_behind_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same weights; what is left of a run that was killed is a whole stage, or nothing."""
    generator = np.random.default_rng(0)
    streams = {part: generator.integers(0, 200, 40_000).astype(np.uint16) for part in ("train", "evaluation")}
    np.savez(tmp_path / "corpus.npz", words=np.arange(100, 164), **streams)
    config = {**glm.demo_config(layers=2, index_topk=8), "vocab_size": 512}
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
