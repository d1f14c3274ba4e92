"""The layers of a dense model that see a sliding window, as transformers reads its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.errors import ModelConfigError

_FULL_ATTENTION = "full_attention"
_DEFAULT_WINDOW, _DEFAULT_BELOW = 4096, 28  # layers below the second see everything
_SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_BY_LAYER = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_layers(config: Mapping[str, Any], name: str, num_layers: int, architecture: str) -> None:
    """Check that every layer attends to everything.

    Raises:
        ModelConfigError: naming the key that says otherwise.
    """
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {_FULL_ATTENTION}):
        other = next((kind for kind in kinds if kind != _FULL_ATTENTION), "none") if isinstance(kinds, list) else kinds
        raise ModelConfigError(f"{name}: config.json: layer_types has {other!r}, expected {_FULL_ATTENTION} alone")
    window = sliding_window(config, architecture)
    if not window:
        return
    if architecture in _BY_LAYER:
        below = config.get("max_window_layers", _DEFAULT_BELOW)
        if kinds is not None or (isinstance(below, int) and below >= num_layers):
            return
    given = f"{window!r}" if "sliding_window" in config else f"not there, which transformers takes for {window}"
    raise ModelConfigError(f"{name}: config.json: sliding_window is {given}, expected layers that see all")


def sliding_window(config: Mapping[str, Any], architecture: str) -> Any:
    """Return the window of layers that have one; `None` where none has."""
    if architecture in _SWITCHED:
        return config.get("sliding_window", _DEFAULT_WINDOW) if config.get("use_sliding_window") else None
    return config.get("sliding_window", _DEFAULT_WINDOW if architecture == "MistralForCausalLM" else None)
