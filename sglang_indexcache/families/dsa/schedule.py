"""The facts of a config.json about a DSA model's layers, indexers apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.errors import ModelConfigError

_SPARSE_NAMES = ("indexed_attention", "deepseek_sparse_attention")  # of transformers since 5.22, and before


def expert_layers(num_layers: int, dense: int) -> list[str]:
    """Return `mlp_layer_types` for a config.json that has none: the first layers are dense."""
    return ["dense"] * min(dense, num_layers) + ["sparse"] * max(num_layers - dense, 0)


def check_layer_types(config: Mapping[str, Any], name: str) -> None:
    """Check that all layers have an indexer, or reuse another layer's selection.

    Raises:
        ModelConfigError: naming another kind of layer, or a list that is invalid.
    """
    for key in ("layer_types", "mlp_layer_types"):
        kinds = config.get(key)
        if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
            raise ModelConfigError(f"{name}: config.json: {key} is {str(kinds)[:60]!r}, expected a list of words")
    other = next((kind for kind in config.get("layer_types") or () if kind not in _SPARSE_NAMES), None)
    if other is not None:
        raise ModelConfigError(f"{name}: config.json: layer_types has {other!r}, expected {_SPARSE_NAMES[0]} alone")
