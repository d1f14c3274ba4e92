"""A latency table of a whole model as it might be, in round figures."""

from __future__ import annotations

from typing import Any


def whole_table() -> dict[str, Any]:
    """Six layers, two of them dense, as a rank of a model of 78 layers on eight."""
    return {
        "schema": "indexcache-prices/v2",
        "name": "made",
        "device": "NVIDIA H200",
        "versions": {"sglang": "0.5.23"},
        "date": "2026-11-29",
        "heads": 8,
        "index_heads": 32,
        "index_topk": 2048,
        "kv_cache_dtype": "bfloat16",
        "chunk": 1000,
        "layers": 6,
        "contexts": [1000, 4000],
        "prompt": {
            "full_ms": {"1": [10.0, 40.0], "4": [9.0, 36.0]},
            "shared_ms": {"1": [8.0, 32.0], "4": [7.0, 28.0]},
            "rest_ms": [100.0, 100.0],
        },
        "decode": {"full_ms": [0.2, 0.2], "shared_ms": [0.1, 0.1]},
        "whole": {
            "label": "six layers measured",
            "tp": 8,
            "layers": 78,
            "dense_layers": 3,
            "measured_dense_layers": 2,
            "shape": {"n_routed_experts": 256, "num_experts_per_tok": 8},
            "expert_ms": [2.0, 8.0],
            "dense_ms": [1.0, 4.0],
            "collectives": {
                "ranks": 8,
                "bytes_per_token": 49152,
                "gb_s": 400.0,
                "measured_ranks": 2,
                "step_ms": 0.05,
            },
        },
        "checks": [
            {
                "pattern": "FSFSFS",
                "context": 1000,
                "measured_ms": 152.0,
                "expected_ms": 152.0,
                "plain_ms": 158.0,
                "spread": 0.01,
            }
        ],
    }
