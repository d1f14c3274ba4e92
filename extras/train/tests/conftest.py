"""A distilled model, shared by the tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from extras.train.tests.distilling import distill
from tests.conftest import VOCAB


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "training.jsonl"
    rows = np.random.default_rng(2).integers(3, VOCAB, (40, 32)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def trained(model_folder: Path, training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run."""
    output = tmp_path_factory.mktemp("trained") / "out"
    code, text = distill(model_folder, training, output)
    assert code == 0, text
    return output
