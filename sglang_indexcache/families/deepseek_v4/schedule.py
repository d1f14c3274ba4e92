"""The layers of a DeepSeek-V4 that compress what they attend to, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.families.deepseek_v4.keys import (
    DEFAULT_COMPRESS_THETA,
    DEFAULT_HASH_LAYERS,
    DEFAULT_ROTARY_SHARE,
    KEYS,
)
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.layers import layer_count
from sglang_indexcache.model.rope import DEFAULT_THETA, rope_parameters

CHOOSING_RATIO = 4  # tokens an entry, in the layers that have an indexer
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": CHOOSING_RATIO, "heavily_compressed_attention": 128}
_HASH_LAYERS = ("num_hash_layers", "n_hash_layers")
_TRAINED_SHARING = ("index_source_layer_ids", "kv_source_layer_ids")


def compression_ratios(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the tokens of an entry by model layer: 0 for a window alone, 4 with an indexer, 128 without.

    NextN layers are left out. Releases have `compress_ratios`, which may go on for their NextN layers; transformers
    saves `layer_types`.

    Raises:
        ModelConfigError: if a config.json has neither, or another kind of layer, as DeepSeek-V4.1 does.
    """
    if config.get("model_type") == "deepseek_v41" or any(config.get(key) for key in _TRAINED_SHARING):
        raise ModelConfigError(f"{name}: DeepSeek-V4.1 was trained with indexers that layers share; expected V4")
    num_layers = layer_count(config, name)
    key = "compress_ratios" if config.get("compress_ratios") is not None else "layer_types"
    values = config.get(key)
    if not isinstance(values, list) or len(values) < num_layers:
        raise ModelConfigError(f"{name}: config.json: {key} is {str(values)[:60]}, expected one for each layer")
    for alias, ratio in (("compress_rate_csa", CHOOSING_RATIO), ("compress_rate_hca", 128)):
        if config.get(alias) not in (None, ratio):
            raise ModelConfigError(f"{name}: config.json: {alias} is {config[alias]!r}, expected {ratio}")
    rates = config.get("compress_rates")
    if rates is not None and rates != {kind: ratio for kind, ratio in _RATIOS.items() if ratio}:
        raise ModelConfigError(f"{name}: config.json: compress_rates is {str(rates)[:100]}, expected 4 and 128")
    return tuple(_ratio(value, key, layer, name) for layer, value in enumerate(values[:num_layers]))


def _ratio(value: Any, key: str, layer: int, name: str) -> int:
    ratio: Any = _RATIOS.get(value) if isinstance(value, str) and key == "layer_types" else value
    if isinstance(ratio, bool) or ratio not in _RATIOS.values():
        expected = " or ".join(map(str, _RATIOS if key == "layer_types" else _RATIOS.values()))
        raise ModelConfigError(f"{name}: config.json: {key} has {value!r} for layer {layer}; expected {expected}")
    return int(ratio)


def hash_layers(config: Mapping[str, Any], num_layers: int, name: str) -> int:
    """Return how many of the first layers route tokens by a table: `num_hash_layers`, or by `mlp_layer_types`.

    Raises:
        ModelConfigError: if it is no number, or other layers than the first do.
    """
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        given = next((config[key] for key in _HASH_LAYERS if config.get(key) is not None), DEFAULT_HASH_LAYERS)
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ModelConfigError(f"{name}: config.json: num_hash_layers is {str(given)[:60]!r}, expected a number")
        return min(given, num_layers)
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise ModelConfigError(
            f"{name}: config.json: mlp_layer_types is {str(kinds)[:60]}, expected one for each layer"
        )
    hashed = kinds[:num_layers].count("hash_moe")
    if kinds[:num_layers] != ["hash_moe"] * hashed + ["moe"] * (num_layers - hashed):
        raise ModelConfigError(
            f"{name}: config.json: mlp_layer_types is {str(kinds)[:60]}, expected hash_moe, then moe"
        )
    return hashed


def rotary(config: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the rotary parameters of layers that see a window alone, and of those that compress, as in transformers.

    Raises:
        ModelConfigError: if they are invalid.
    """
    saved = config.get("rope_parameters")
    if not config.get("rope_scaling") and isinstance(saved, Mapping) and {"main", "compress"} <= set(saved):
        return {kind: rope_parameters({"rope_parameters": saved[kind]}, name) for kind in ("main", "compress")}
    positions = {"max_position_embeddings": KEYS["DeepseekV4ForCausalLM"].defaults["max_position_embeddings"]}
    compress = rope_parameters({**positions, **config}, name)
    share = config.get("partial_rotary_factor")
    if share is None:
        head_dim = config.get("head_dim") or KEYS["DeepseekV4ForCausalLM"].defaults["head_dim"]
        wide = config.get("qk_rope_head_dim")
        try:
            share = DEFAULT_ROTARY_SHARE if wide is None else wide / head_dim
        except TypeError:
            raise ModelConfigError(f"{name}: config.json: qk_rope_head_dim is {wide!r}, expected a number") from None
    theta = {"rope_theta": config.get("rope_theta") or DEFAULT_THETA, "partial_rotary_factor": share}
    compress |= {**theta, "rope_theta": config.get("compress_rope_theta") or DEFAULT_COMPRESS_THETA}
    if compress["rope_type"] == "yarn":
        compress.setdefault("attention_factor", 1.0)
    return {"main": {"rope_type": "default", **theta}, "compress": compress}
