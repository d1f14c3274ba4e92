"""Keys and values for beginnings of sequences, which every pattern of a dense model computes alike.

Every layer attends to everything in a prompt, and as long as all pages fit into the selection.
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


class PromptCache:
    """Cache of the keys and values of beginnings, on the model's device; the oldest are dropped first.

    Args:
        model: a dense model of transformers.
        limit: bytes; beginnings that do not fit are recomputed each time, with the same bits.
    """

    def __init__(self, model: Any, limit: float) -> None:
        self._model, self._limit, self._held = model, limit, 0
        self._caches: OrderedDict[str, Any] = OrderedDict()

    @contextmanager
    def read(self, name: str, tokens: Tensor) -> Iterator[tuple[Any, bool]]:
        """Yield a cache that holds `tokens`, for one forward after them, and true if they had to be run.

        Args:
            name: key of `tokens`.
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
            for layer, keys, values in kept:  # the forward appended to them
                layer.keys, layer.values = keys, values
            if known or self._held + size <= self._limit:
                self._caches[name] = cache
                self._held += 0 if known else size

    def _fill(self, tokens: Tensor) -> Any:
        """Run `tokens` with the model's own attention, fused where possible, without `[queries, keys]`."""
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
