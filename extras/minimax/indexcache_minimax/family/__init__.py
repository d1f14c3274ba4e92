"""MiniMax-M3: each index head chooses blocks of keys for its group of query heads, and layers may share a choice.

A pattern has one letter for each layer with an index, 57 of the 60 of the released model. Read: SGLang 0.5.23 (see
`sglang`), and transformers/models/minimax_m3_vl of 5.19, 5.23 and 5.24.
"""

from __future__ import annotations

from typing import Any

from indexcache_minimax.family import read_sources
from indexcache_minimax.family.checkpoint import MinimaxM3Checkpoint
from indexcache_minimax.family.sglang import MinimaxM3Sglang
from sglang_indexcache.families.base import Family, TransformersAdapter
from sglang_indexcache.sglang.read_sources import READ


class MinimaxM3Transformers(TransformersAdapter):
    """An adapter that finds the indexers, whose choice is `[batch, index heads, queries, blocks]`."""

    on_kernels = False

    def indexer_modules(self, model: Any) -> list[Any]:
        """See `TransformersAdapter.indexer_modules`."""
        found = (layer.self_attn.indexer for layer in model.model.layers)
        return [item for item in found if item is not None]


READ.update(read_sources.READ)
_CHECKPOINT = MinimaxM3Checkpoint()
MINIMAX_M3 = Family("minimax_m3", _CHECKPOINT, MinimaxM3Sglang(_CHECKPOINT), MinimaxM3Transformers())
