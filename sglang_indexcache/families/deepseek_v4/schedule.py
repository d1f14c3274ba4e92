"""Which layers of a DeepSeek-V4 compress what they attend to, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.errors import ModelConfigError
from sglang_indexcache.model import layer_count

CHOOSING_RATIO = 4  # tokens an entry, in the layers that have an indexer
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": CHOOSING_RATIO, "heavily_compressed_attention": 128}
_TRAINED_SHARING = ("index_source_layer_ids", "kv_source_layer_ids")


def compression_ratios(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Tokens an entry, by model layer: 0 for a window alone, 4 with an indexer, 128 without. NextN layers left out.

    A release says it in `compress_ratios`, which may go on for its NextN layers; transformers saves `layer_types`.

    Raises:
        ModelConfigError: if a config.json says neither, or something else; DeepSeek-V4.1 does.
    """
    if config.get("model_type") == "deepseek_v41" or any(config.get(key) for key in _TRAINED_SHARING):
        raise ModelConfigError(f"{name}: DeepSeek-V4.1 was trained with indexers that layers share; expected V4")
    num_layers = layer_count(config, name)
    key = "compress_ratios" if config.get("compress_ratios") is not None else "layer_types"
    values = config.get(key)
    if not isinstance(values, list) or len(values) < num_layers:
        raise ModelConfigError(f"{name}: config.json: {key} is {str(values)[:60]}, expected one for each layer")
    rates = config.get("compress_rates")
    if rates is not None and rates != {kind: ratio for kind, ratio in _RATIOS.items() if ratio}:
        raise ModelConfigError(f"{name}: config.json: compress_rates is {str(rates)[:100]}, expected 4 and 128")
    return tuple(_ratio(value, key, layer, name) for layer, value in enumerate(values[:num_layers]))


def _ratio(value: Any, key: str, layer: int, name: str) -> int:
    ratio: Any = _RATIOS.get(value) if isinstance(value, str) and key == "layer_types" else value
    if isinstance(ratio, bool) or ratio not in _RATIOS.values():
        expected = " or ".join(map(str, _RATIOS if key == "layer_types" else _RATIOS.values()))
        hint = ", as in DeepSeek-V4.1" if not isinstance(ratio, bool) and ratio in (1, 2) else ""
        raise ModelConfigError(f"{name}: config.json: {key} has {value!r} for layer {layer}{hint}; expected {expected}")
    return int(ratio)
