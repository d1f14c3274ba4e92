"""Dense models, which all experiments run on."""

from __future__ import annotations

from typing import Any

from indexcache_dense.selection import Selection
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import describe_model
from sglang_indexcache import ModelLayers


def describe_dense(model: str, selection: Selection | None = None) -> ModelLayers:
    """Describe a dense model by its config.json.

    Raises:
        SearchError: if the model has indexers.
        ModelConfigError: if the model is of no known family.
    """
    if not describe_model(model).dense:
        raise SearchError(f"{model} has indexers that choose, expected a dense model")
    return describe_model(model, selection)


def key_heads(config: Any) -> tuple[int, int]:
    """Return the number of key heads of a layer, and the dimensions of a key, which are those of a value."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim
