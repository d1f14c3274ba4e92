"""What indexcache-distill writes is served as it stands, and computes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sglang")

from typer.testing import CliRunner

from dsa_cpu_platform import recorder
from indexcache_search.cli.distill import app
from scripts.tools import random_models
from scripts.tools.inprocess import generate
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check_main
from tests.live.reference import load_reference
from tests.live.server import running
from tests.live.test_parity import check_parity, numbered, prompts
from tests.live.test_server import CHUNK, check_modes, random_prompts, states

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore::FutureWarning")]
PATTERN = Pattern("FSSFFS")


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
    result = CliRunner().invoke(app, [part for name, value in options.items() for part in (f"--{name}", str(value))])
    assert result.exit_code == 0, result.output
    return folder / "out"


def test_a_distilled_checkpoint_in_a_server(tmp_path: Path) -> None:
    """Its S layers have no indexer weights, and its config.json has the pattern."""
    out, record = distill("glm-moe", tmp_path), tmp_path / "record"
    record.mkdir()
    model, file = out / "model", str(out / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--chunked-prefill-size", str(CHUNK), "--skip-tokenizer-init")
    with running(model, tmp_path / "log", *flags, DSA_CPU_RECORD=str(record)) as server:
        assert [state["pattern"] for state in states(server)] == [PATTERN.roles]
        assert check_main([file, "--server", server.url]) == 0
        check_modes(server, load_reference(model), PATTERN, record, random_prompts())


def test_a_distilled_checkpoint_that_keeps_all_indexers(tmp_path: Path) -> None:
    out, record = distill("deepseek-v3.2", tmp_path), tmp_path / "record"
    record.mkdir()
    model = out / "model"
    answers = numbered(generate(model, str(out / "pattern.yaml"), prompts(model), 4, record))
    runs = recorder.read(record)
    assert {run.layer for run in runs} == set(PATTERN.full_layers)
    check_parity(load_reference(model), PATTERN, answers, runs)
