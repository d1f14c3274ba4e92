"""What indexcache-distill writes is served as it stands, and computes what transformers computes.

Dense models are compared with transformers' dense ones: SGLang's own latent attention without indexers needs a CPU with
AMX, and gives other logprobs on its native backend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from typer.testing import CliRunner

from dsa_cpu_platform import recorder
from indexcache_train.cli import app
from indexcache_train.distill.conversion import convert
from indexcache_train.distill.dense_mla import DenseStart
from indexcache_train.distill.settings import IndexerSize
from scripts.tools import random_models
from scripts.tools.inprocess import generate
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from tests.live.reference import TOLERANCE, load_reference
from tests.live.server import running
from tests.live.test_parity import check_parity, numbered, prompts
from tests.live.test_server import CHUNK, check_modes, random_prompts, states

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore::FutureWarning")]
PATTERN = Pattern("FSSFFS")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def distill(kind: str, folder: Path) -> Path:
    """The output folder of a short run on a random model."""
    model = random_models.build(kind, folder / "model")
    rows = np.random.default_rng(0).integers(2, random_models.VOCAB, (40, 64)).tolist()
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    options = {
        "model": model,
        "pattern": PATTERN,
        "training": data,
        "output": folder / "out",
        "device": "cpu",
        "seq-len": 64,
        "num-sequences": 16,
        "num-eval-sequences": 4,
        "batch-size": 4,
        "warmup": "steps=3",
        "sparse": "steps=3,lr=1e-3,indexer_lr=1e-3",
        "dtype": "float32",
    }
    if kind in random_models.MLA_KINDS:
        options |= {"index-heads": 32, "index-dim": 128, "index-topk": random_models.TOPK}
    result = CliRunner().invoke(app, [part for name, value in options.items() for part in (f"--{name}", str(value))])
    assert result.exit_code == 0, result.output
    return folder / "out"


@pytest.mark.parametrize("kind", [pytest.param("glm-moe", marks=pytest.mark.slow), "glm-4.7-flash"])
def test_a_distilled_checkpoint_in_a_server(kind: str, tmp_path: Path) -> None:
    """Its S layers have no indexer weights, and its config.json has the pattern. The second one was dense."""
    out, record = distill(kind, tmp_path), tmp_path / "record"
    record.mkdir()
    model, file = out / "model", str(out / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--chunked-prefill-size", str(CHUNK), "--skip-tokenizer-init")
    with running(model, tmp_path / "log", *flags, DSA_CPU_RECORD=str(record)) as server:
        assert [state["pattern"] for state in states(server)] == [PATTERN.roles]
        assert check_main([file, "--server", server.url]) == 0
        check_modes(server, load_reference(model), PATTERN, record, random_prompts())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in random_models.MLA_KINDS), ("deepseek-v3", {"rope_parameters": YARN})],
    ids=[*random_models.MLA_KINDS, "deepseek-v3 with YaRN"],
)
def test_a_dense_model_with_indexers_that_select_everything(kind: str, changes: Any, tmp_path: Path) -> None:
    """Its weights are the dense model's, and SGLang computes what the dense model does in transformers."""
    dense, folder = random_models.build(kind, tmp_path / "dense", **changes), tmp_path / "model"
    start = DenseStart.read(str(dense), IndexerSize(topk=256))
    assert start is not None
    for made in (folder, tmp_path / "record"):
        made.mkdir()
    convert(dense, start, 0, folder)
    reference = load_reference(dense)
    for served in generate(folder, None, prompts(dense), 4, tmp_path / "record"):
        with torch.inference_mode():
            logits = reference(torch.tensor([list(served.ids[:-1])]), use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(served.ids[1:])[:, None])[:, 0]
        assert len(served.ids) <= start.size.topk
        assert (logprobs - torch.tensor(served.logprobs)).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("kind", ["deepseek-v3.2", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_distilled_checkpoint_that_keeps_all_indexers(kind: str, tmp_path: Path) -> None:
    out, record = distill(kind, tmp_path), tmp_path / "record"
    record.mkdir()
    model = out / "model"
    answers = numbered(generate(model, str(out / "pattern.yaml"), prompts(model), 4, record))
    runs = recorder.read(record)
    assert {run.layer for run in runs} == set(PATTERN.full_layers)
    check_parity(load_reference(model), PATTERN, answers, runs)
