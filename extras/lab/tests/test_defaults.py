"""The lab's commands: a default number of sequences is a wish, and the next command is one that works."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from indexcache_dense.family import DENSE_GQA
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_lab import cli
from indexcache_lab.dense import next_line
from indexcache_lab.offload import cli as offload_cli
from sglang_indexcache import Pattern
from tests.conftest import VOCAB

FEW = "pages=3,page_tokens=4,recent_pages=1"
NOSA = ReusePolicy(policy="nosa", query_pages=8, importance="heads")
COMMANDS = {
    "offload": ["--evaluation", "--decode-steps", 8, "--pattern", "DSSSSS", "--selection", FEW, "--max-transfer", 1000,
                "--device", "cpu"],
    "key-delta search": ["--calibration", "--dry-run"],
    "key-delta eval": ["--evaluation", "--dry-run"],
    "eviction": ["--training", "--dry-run", "--selection", "page_tokens=32,pages=3,recent_pages=2,sink_pages=0",
                 "--heads", "query_pages=1"],
}  # fmt: skip


def run(name: str, folder: Path, data: Path, output: Path, *more: object) -> Any:
    first, *rest = COMMANDS[name]
    words = ["--model", folder, first, data, "--seq-len", 160, "--output", output, *rest, *more]
    app, own = (offload_cli.app, []) if name == "offload" else (cli.app, name.split())
    return CliRunner().invoke(app, [*own, *map(str, words)])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_default_number_of_sequences_is_a_wish_and_a_given_one_a_demand(
    name: str, dense_folder: Path, tmp_path: Path
) -> None:
    """Twelve sequences were refused, since nobody had asked for fewer than 24."""
    data = tmp_path / "few.jsonl"
    rows = np.random.default_rng(5).integers(3, VOCAB, (12, 160)).tolist()
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    found = run(name, dense_folder, data, tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "fewer than the default of" in found.stderr + found.output
    asked = run(name, dense_folder, data, tmp_path / "asked", "--num-sequences", 24)
    assert asked.exit_code == 2 and "24 were asked for" in " ".join(asked.output.split()), asked.output
    if name == "offload":
        flags = "--attention-backend flashinfer --page-size 4"
        lines = found.stdout.splitlines()[-2:]
        assert lines[0].startswith("No server offloads dense models yet: take buffer_pages out of ")
        assert lines[1].startswith("Next: python -m sglang_indexcache.launch_server") and lines[1].endswith(flags)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "Next: python -m sglang_indexcache.launch_server --indexcache-pattern p.yaml --model-path org/name"),
        ({"buffer_pages": 48}, "No server offloads dense models yet: take buffer_pages out of p.yaml, "),
        ({"steps": NOSA}, "No server takes this plan yet: steps nosa:8:heads are not served"),
        ({"heads": "key"}, "No server takes this plan yet: selection "),
    ],
    ids=["served", "buffer", "nosa", "heads"],
)
def test_the_next_command_is_one_that_works(change: dict[str, Any], said: str) -> None:
    """A launch without the backend and the pages was named, also for plans that every server refuses."""
    chosen = replace(
        Selection(pages=32, page_tokens=64, recent_pages=16, sink_pages=1, score="compressed_keys"), **change
    )
    pattern = Pattern("DSSSSS", chosen)
    lines = next_line(pattern, Path("p.yaml"), "org/name").splitlines()
    assert lines[0].startswith(said)
    if "launch_server" in lines[-1]:
        assert lines[-1].endswith("--attention-backend flashinfer --page-size 16")
        DENSE_GQA.sglang.to_overrides({}, replace(pattern, selection=replace(chosen, buffer_pages=None)))
    else:
        counts = "Next: indexcache-offload --model org/name --pattern p.yaml --evaluation traffic.jsonl"
        assert lines[-1] == counts
    assert next_line(Pattern("FSSSSS"), Path("p.yaml"), "org/name").endswith("--model-path org/name")
