"""A DeepSeek-V3.2 by the name of DeepSeek-V3 is served, and proven, as the same model under its own name."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from scripts.tools import random_models
from scripts.tools.inprocess import Served, generate
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern

pytestmark = pytest.mark.sglang

PATTERN = Pattern("FSFSSF")


def answers(folder: Path, pattern: str | None, record: Path) -> tuple[list[Served], set[int]]:
    """What SGLang answers, and the layers whose indexers ran."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, random_models.VOCAB) for _ in range(length)] for length in (200, 90)]
    record.mkdir()
    served = generate(folder, pattern, prompts, 4, record)
    return served, {run.layer for run in recorder.indexers(recorder.read(record))}


def test_the_name_of_v3_changes_nothing(tmp_path: Path) -> None:
    own = random_models.build("deepseek-v3.2", tmp_path / "own")
    early = shutil.copytree(own, tmp_path / "early")
    config = json.loads((own / "config.json").read_text())
    names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (early / "config.json").write_text(json.dumps({**config, **names}))
    file = write_pattern(PATTERN, own, tmp_path / "pattern.yaml")

    expected, kept = answers(own, file, tmp_path / "of-own")
    assert kept == set(PATTERN.full_layers)
    found, ran = answers(early, file, tmp_path / "of-early")
    assert ran == kept
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    everything, all_layers = answers(early, None, tmp_path / "without")
    assert all_layers == set(range(len(PATTERN)))
    assert everything[0].logprobs != pytest.approx(expected[0].logprobs, abs=1e-3)
