"""`indexcache-check` on odd overrides, by seed: one line, or the answer of the slow definition."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extras.launch.tests.override_spellings import LAYERS, V32, VERSIONS, case, letters, odd_keys, slow
from indexcache_launch.rules import GLM
from sglang_indexcache.check import main
from sglang_indexcache.sglang.override_flag import FLAG
from tests.conftest import tiny_config

MODEL_TYPES = {GLM: "glm_moe_dsa", V32: "deepseek_v32"}


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """All versions that were read count."""
    monkeypatch.setattr("sglang_indexcache.sglang.probes.SglangSource.installed", lambda: None)


def write(folder: Path, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    content = tiny_config(MODEL_TYPES[architecture], layers=LAYERS) | config
    (folder / "config.json").write_text(json.dumps(content))
    return content


def test_an_override_alone_is_answered_for_every_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[Any] = Counter()
    for seed in range(7000, 7600):
        architecture, config, overrides = case(seed)
        if architecture not in MODEL_TYPES:
            continue
        content = write(tmp_path, architecture, config)
        code = main(["--model", str(tmp_path), FLAG, json.dumps(overrides) + " ", "--json"])
        said = capsys.readouterr()
        seen[code] += 1
        if code == 2:  # a config.json that nobody means, or an override without roles
            assert said.err.startswith("indexcache-check: ") and said.err.count("\n") == 1, seed
            continue
        report = json.loads(said.out)
        found = {
            version: item["roles"]
            for item in report["readings"]
            for version in item["versions"]
            if item["engine"] == "SGLang"
        }
        assert found == {version: slow(version, architecture, content, overrides) for version in VERSIONS}, seed
        assert code == (1 if report["problems"] else 0)
        if code == 0:  # every version runs what every key says
            assert set(found.values()) == {report["means"]}, seed
    assert min(seen[code] for code in (0, 1, 2)) > 5, seen


def test_an_override_of_a_launch_line_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Served without a problem: the launcher serves the pattern; warned exactly where a version alone would not."""
    seen: Counter[Any] = Counter()
    for seed in range(8000, 8300):
        rng = Random(seed)
        architecture, roles = rng.choice((GLM, V32)), letters(rng)
        words = ["full" if role == "F" else "shared" for role in roles]
        right = ({"index_topk_pattern": roles}, {"indexer_types": words})
        overrides = odd_keys(rng) if rng.random() < 0.5 else {**rng.choice(right), **rng.choice(({}, *right))}
        content = write(tmp_path, architecture, {})
        line = f"--tp 2 {FLAG} '{json.dumps(overrides)}'"
        code = main([roles, "--model", str(tmp_path), "--server-args", line, "--json"])
        report = json.loads(capsys.readouterr().out)
        assert code == (1 if report["problems"] else 0)
        warned = [warning for warning in report["warnings"] if warning.startswith("without the launcher")]
        alike = all(slow(version, architecture, content, overrides) == roles for version in VERSIONS)
        if code == 0 and overrides:
            assert bool(warned) is not alike, (seed, overrides, warned)
        if alike and overrides.get("cli_factor") is None:
            assert code == 0 or "index_skip_topk_offset" in overrides, (seed, overrides, report["problems"])
        seen[code, bool(warned)] += 1
    assert seen[0, True] > 20 and seen[0, False] > 20 and seen[1, False] > 20, seen
