"""indexcache-distill on a tiny model: its words, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from indexcache_search.engines.own_server import free_port
from indexcache_train.cli import app
from tests.forked import forked

PATTERN = "FSSFSS"
SIZES = {"seq-len": 32, "num-sequences": 12, "num-eval-sequences": 3, "warmup-steps": 2, "steps": 4, "batch-size": 4}
RATES = {"lr": 1e-3, "indexer-lr": 1e-3, "ramp-steps": 1, "evaluate-every": 2, "checkpoint-every": 3}

SETTINGS = {
    "warmup-steps": "warmup steps",
    "steps": "sparse steps",
    "lr": "sparse lr",
    "indexer-lr": "sparse indexer_lr",
    "ramp-steps": "optimizer ramp_steps",
    "max-norm": "optimizer max_norm",
    "evaluate-every": "every evaluate",
    "checkpoint-every": "every checkpoint",
    "micro-batch": "engine micro_batch",
    "memory-check": "engine memory_check",
    "attention": "engine attention",
    "shared-indexers": "write shared_indexers",
    "tensorboard": "write tensorboard",
}


def arguments(model: Path, data: Path, output: Path, **changes: Any) -> list[str]:
    options = {"model": model, "pattern": PATTERN, "training": data, "output": output, "device": "cpu"}
    named = {**options, **SIZES, **RATES, **{name.replace("_", "-"): value for name, value in changes.items()}}
    words: dict[str, list[str]] = {}
    for name, value in named.items():
        option, _, key = SETTINGS.get(name, name).partition(" ")
        words.setdefault(option, []).extend([] if value is True else [f"{key}={value}" if key else str(value)])
    if changes.get("search_first"):
        del words["pattern"]
    return [part for option, values in words.items() for part in (f"--{option}", ",".join(values)) if part]


def distill(*args: Any, **changes: Any) -> tuple[int, str]:
    """Exit code and what the terminal shows."""
    result = CliRunner().invoke(app, arguments(*args, **changes))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def in_two_processes(words: list[str], log: Path) -> None:
    """Run a training in two processes (gloo), as torchrun starts them, and check that both end well."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        forked("indexcache_train", words, stderr=str(log), RANK=rank, LOCAL_RANK=rank, **group) for rank in "01"
    ]
    for process in processes:
        process.join(300)
    for process in processes:
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], log.read_text()[-3000:]


def records(output: Path) -> list[dict[str, Any]]:
    """The log without times, and without checksums, which hold them."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "check")} for line in lines]


def train_alike(one: Path, two: Path, bound: float) -> None:
    """Check that two runs logged the same and wrote the same tensors."""
    for ours, theirs in zip(records(one), records(two), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("loss", "kl", "losses", "held_out_kl", "kl_layers"):
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=bound, abs=bound)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys()
