"""Beginnings of sequences that no pattern of a dense model changes: read once, and kept as keys and values.

While a prompt is read, and as long as all pages fit into a selection, every layer attends to everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from indexcache_search.hf.cache_argument import cache_argument


class Beginnings:
    """Keys and values of beginnings in memory, on the model's device; the oldest go first.

    Args:
        model: a dense model of transformers.
        limit: bytes; what does not fit is read anew each time, which gives the same bits.
    """

    def __init__(self, model: Any, limit: float) -> None:
        self._model, self._limit, self._held = model, limit, 0
        self._caches: OrderedDict[str, Any] = OrderedDict()

    @contextmanager
    def read(self, name: str, tokens: Tensor) -> Iterator[tuple[Any, bool]]:
        """A cache that `tokens` are in, for one forward of what follows, and whether they had to be read.

        Args:
            name: names `tokens`.
            tokens: `[sequences, beginning]`.
        """
        known = name in self._caches
        cache = self._caches.pop(name) if known else self._fill(tokens)
        size = _size(cache)
        if not known:
            while self._caches and self._held + size > self._limit:
                self._held -= _size(self._caches.popitem(last=False)[1])
        kept = [(layer, layer.keys, layer.values) for layer in cache.layers]
        try:
            yield cache, not known
        finally:
            for layer, keys, values in kept:  # layers that ran have added to theirs
                layer.keys, layer.values = keys, values
            if known or self._held + size <= self._limit:
                self._caches[name] = cache
                self._held += 0 if known else size

    def _fill(self, tokens: Tensor) -> Any:
        """The model's own attention, fused where there is such, which needs no `[queries, keys]`."""
        before, cache = self._model.config._attn_implementation, DynamicCache(config=self._model.config)
        self._model.set_attn_implementation("sdpa")
        try:
            with torch.inference_mode():
                self._model.model(input_ids=tokens, **cache_argument(self._model.model, cache), use_cache=True)
        finally:
            self._model.set_attn_implementation(before)
        return cache


def _size(cache: Any) -> int:
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)
