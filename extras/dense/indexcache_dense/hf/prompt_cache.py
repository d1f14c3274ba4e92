"""Keys and values for beginnings of sequences, which every pattern of a dense model computes alike.

Every layer attends to everything in a prompt, and as long as all pages fit into the selection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from indexcache_search.hf.cache_argument import cache_argument


@dataclass(frozen=True)
class SequenceEnd:
    """Tokens of sequences that have to run, after a beginning that is known."""

    tokens: Tensor  # [sequences, tokens]
    prompt: Tensor | None  # [sequences, tokens], see `TokenSet`
    past: Any  # keys and values of the beginning, if there is one
    read: int  # tokens per sequence that were run to fill that cache


class PromptCache:
    """Cache of the keys and values of beginnings, on the model's device; the oldest are dropped first.

    Args:
        model: a dense model of transformers.
        limit: bytes; beginnings that do not fit are recomputed each time, with the same bits.
    """

    def __init__(self, model: Any, limit: float) -> None:
        self._model, self._limit = model, limit
        self._caches: OrderedDict[str, Any] = OrderedDict()

    @contextmanager
    def read(self, name: str, tokens: Tensor) -> Iterator[tuple[Any, bool]]:
        """Yield a cache that holds `tokens`, for one forward after them, and true if they had to be run.

        Args:
            name: key of `tokens`.
            tokens: `[sequences, beginning]`.
        """
        must_run = name not in self._caches
        if must_run:
            self._caches[name] = self._fill(tokens)
        self._caches.move_to_end(name)
        cache = self._caches[name]
        while sum(map(_size, self._caches.values())) > self._limit:
            self._caches.popitem(last=False)
        kept = [(layer, layer.keys, layer.values) for layer in cache.layers]
        try:
            yield cache, must_run
        finally:
            for layer, keys, values in kept:  # the forward appended to them
                layer.keys, layer.values = keys, values

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
