"""Dense models, which all experiments run on, and what to do with a plan of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from indexcache_dense.family import DENSE_GQA
from indexcache_dense.selection import Selection, selection_in
from indexcache_search.console import command, serving
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import describe_model
from sglang_indexcache import IndexCacheError, ModelLayers, Pattern


def describe_dense(model: str, selection: Selection | None = None) -> ModelLayers:
    """Describe a dense model by its config.json.

    Raises:
        SearchError: if the model has indexers.
        ModelConfigError: if the model is of no known family.
    """
    if not describe_model(model).dense:
        raise SearchError(f"{model} has indexers that choose, expected a dense model")
    return describe_model(model, selection)


def next_line(pattern: Pattern, path: Path, model: object) -> str:
    """Say what to do with a pattern: serve it, or count what it would bring where no server takes it.

    Args:
        pattern: that of the file.
        path: the file.
        model: folder or hub id.
    """
    chosen = selection_in(pattern)
    if chosen is None:
        return f"Next: {serving(path, model, None)}"
    try:
        DENSE_GQA.sglang.to_overrides({}, replace(pattern, selection=replace(chosen, buffer_pages=None)))
    except IndexCacheError as error:
        counts = command("indexcache-offload", "--model", model, "--pattern", path, "--evaluation", "traffic.jsonl")
        return f"No server takes this plan yet: {error}\nNext: {counts}"
    line = f"Next: {serving(path, model, chosen)}"
    if chosen.buffer_pages is None:
        return line
    return f"No server offloads dense models yet: take buffer_pages out of {path}, and all stays on the device\n{line}"


def key_heads(config: Any) -> tuple[int, int]:
    """Return the number of key heads of a layer, and the dimensions of a key, which are those of a value."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim
