"""Rotary parameters of a config.json, in one form: releases and versions of transformers write them in several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.io.errors import ModelConfigError

DEFAULT_THETA = 10000
_OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")

PARAMETERS = frozenset(
    """
    rope_type type factor attention_factor beta_fast beta_slow mscale mscale_all_dim short_factor long_factor
    low_freq_factor high_freq_factor truncate
    """.split()
    + list(_OUTSIDE)
)
ROPE_KEYS = frozenset(("rope_parameters", "rope_scaling", *_OUTSIDE))


def rope_parameters(config: Mapping[str, Any], name: str = "model") -> dict[str, Any]:
    """Return `rope_parameters`, `rope_scaling` and the keys beside them in one mapping, as transformers combines them.

    Raises:
        ModelConfigError: if one of them is no mapping.
    """
    given: Any = {}
    for key in ("rope_parameters", "rope_scaling"):  # the last one wins
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ModelConfigError(f"{name}: config.json: {key} is {str(value)[:60]!r}, expected a mapping")
        given = value or given
    rope = {key: value for key, value in given.items() if value is not None and key != "type"}
    rope.setdefault("rope_type", given.get("type") or "default")
    outside = {key: config[key] for key in _OUTSIDE if config.get(key) is not None}
    rope.setdefault("rope_theta", outside.get("rope_theta", DEFAULT_THETA))
    if "partial_rotary_factor" in outside:
        rope.setdefault("partial_rotary_factor", outside["partial_rotary_factor"])
    if rope["rope_type"] in _WITH_ORIGINAL:
        if "original_max_position_embeddings" in outside:
            rope["original_max_position_embeddings"] = outside["original_max_position_embeddings"]
        elif config.get("max_position_embeddings") is not None:
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return rope
