"""Results of searches and comparisons as they might be, for tests of what is shown of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from indexcache_search.results.schema import ComparisonResult, SearchResult
from indexcache_search.strategies.budget.table import LatencyTable
from sglang_indexcache import Pattern


def estimate(mean: float, stderr: float | None = 0.01, degrees: int = 1000) -> dict[str, float | None]:
    return {"mean": mean, "stderr": stderr, "degrees": 0 if stderr is None else degrees}


def row(
    name: str,
    retention: str,
    full: int,
    pattern: str | None,
    increase: float,
    kind: str = "named",
    phase: int | None = None,
) -> dict[str, Any]:
    measured = {"loss": estimate(2 + increase), "increase": estimate(increase)}
    source = {**measured, "accuracy": estimate(0.9)}
    sources = {"text.jsonl": source, "demo:kv_end": source}
    return {
        "kind": kind,
        "name": name,
        "retention": retention,
        "phase": phase,
        "full_layers": full,
        "pattern": pattern,
        **measured,
        "by_source": sources,
    }


def sample_content(model_name: str = "tiny") -> dict[str, Any]:
    """metrics.json of a made-up search of eight layers."""
    order, pattern, steps = [3, 5, 7, 2, 6, 1, 4], "F" * 8, []
    for number, layer in enumerate(order, 1):
        pattern = pattern[:layer] + "S" + pattern[layer + 1 :]
        loss = 2 + 0.01 * number**2
        steps.append(
            {
                "layer": layer,
                "full_layers": 8 - number,
                "pattern": pattern,
                "loss": loss,
                "increase": estimate(loss - 2, None if number == 1 else 0.02),
                "candidates": {str(layer): loss},
            }
        )
    rows = [row("baseline", "1", 8, "F" * 8, 0.0, "baseline")]
    made = {
        "1/2": ("FFSSFSFS", "FSFSFSFS", "FFSFSFSS", "FFFFSSSS"),
        "1/4": ("FSSFSSSS", "FSSSFSSS", "FSSSSFSS", "FFSSSSSS"),
    }
    for retention, (found, *others) in made.items():
        full = found.count("F")
        rows += [
            row("greedy", retention, full, found, 0.05),
            row("uniform phase 0", retention, full, others[0], 0.2, "phase", 0),
            row("uniform phase 1", retention, full, others[1], -0.01, "phase", 1),
            row("uniform, mean of 2 phases", retention, full, None, 0.1, "mean"),
            row("similarity", retention, full, others[2], 0.4),
        ]
    return {
        "schema": "indexcache-search/metrics/v3",
        "pattern_file": {
            "schema": "indexcache/v1",
            "retention": 0.5,
            "model": {
                "name": model_name,
                "architecture": "GlmMoeDsaForCausalLM",
                "num_layers": 8,
                "config_sha256": "a" * 64,
                "locked_layers": [],
            },
            "pattern": "FFSSFSFS",
            "search": {
                "strategy": "greedy",
                "objective": "nll",
                "evaluations": 28,
                "seed": 0,
                "baseline_loss": 2.0,
                "loss": 2.05,
                "noise_floor": 0.0,
            },
            "calibration": {
                "sources": ["text.jsonl"],
                "sequences": 4,
                "seq_len": 512,
                "scored_tokens": 1792,
                "sha256": "b" * 64,
            },
            "versions": {"sglang_indexcache": "0.1.0"},
            "created": "2026-11-21",
        },
        "engine": {"name": "transformers 5.23.0", "device": "CPU"},
        "cost": {
            "evaluations": 30,
            "sequences": 77,
            "layer_tokens": 123_000,
            "seconds": 9.5,
            "algorithm_1_layer_tokens": 1_000_000,
            "share_of_algorithm_1": 0.123,
        },
        "seconds": {"search": 12.0},
        "steps": steps,
        "look_alikes": ["1/4: FSSFSSSS keeps other layers than FSSSFSSS"],
        "held_out": {
            "sources": ["text.jsonl", "demo:kv_end"],
            "answer_sources": ["demo:kv_end"],
            "sequences": 12,
            "scored_tokens": 5376,
            "sha256": "c" * 64,
            "rows": rows,
        },
        "overlap": np.clip(1 - 0.1 * np.abs(np.subtract.outer(np.arange(8), np.arange(8))), 0, 1).tolist(),
        "similarity": None,
    }


def sample_metrics(content: dict[str, Any] | None = None) -> SearchResult:
    return SearchResult.model_validate_json(json.dumps(content or sample_content()))


def priced_content(model_name: str = "tiny") -> dict[str, Any]:
    """The same with prices: greedy alone is any good; at 1/4 it loses 0.05 on text, 0.15 on answers."""
    content = sample_content(model_name)
    prices = LatencyTable.load("glm-5-tp8").at(131072)
    content["held_out"]["prices"] = {"table": prices.table, "context": 131072, "words": prices.words}
    native = Pattern.full(8)
    for line in content["held_out"]["rows"]:
        if line["pattern"] is not None:
            line["prefill"] = round(prices.prompt_share(Pattern.parse(line["pattern"]), native), 4)
        line["by_source"] = {name: dict(measured) for name, measured in line["by_source"].items()}
        if line["name"] == "uniform phase 1":
            line["by_source"]["text.jsonl"]["increase"] = estimate(0.3)
        if line["name"] == "greedy" and line["retention"] == "1/4":
            line["by_source"]["demo:kv_end"]["increase"] = estimate(0.15, 0.04)
    return content


def sample_comparison(content: dict[str, Any] | None = None) -> ComparisonResult:
    """eval.json with the rows of a search."""
    held_out = json.loads(json.dumps((content or priced_content())["held_out"]))
    for line in held_out["rows"]:
        for measured in line["by_source"].values():
            measured["accuracy_change"] = estimate(-measured["increase"]["mean"] / 10)
    values = {"schema": "indexcache-eval/v1", "model": "tiny", "engine": "transformers", "seq_len": 512}
    return ComparisonResult.model_validate({**values, "held_out": held_out, "findings": ["greedy 1/2: no worse"]})
