"""Dense models with grouped-query attention: Llama, Qwen2, Qwen3 (also its MoE) and Mistral (DELTA, arXiv 2510.09883).

These models have no indexers, so a pattern says what is selected: pages of the cache. While decoding, a `D` layer
attends to everything, and one that an `S` follows also scores the pages; `S` layers attend to the best of them. SGLang
reads prompts as before. Read: sglang/srt/layers/radix_attention.py and layers/attention of 0.5.17 and 0.5.23, and the
four models in transformers 5.17 and 5.23.
"""

from __future__ import annotations

from typing import Any

from indexcache_dense.family import read_sources
from indexcache_dense.family.checkpoint import DenseGqaCheckpoint
from indexcache_dense.family.sglang import DenseGqaSglang
from sglang_indexcache.families.base import Family, TransformersAdapter
from sglang_indexcache.sglang.read_sources import READ


class DenseGqaTransformers(TransformersAdapter):
    """An adapter that finds no indexer in any layer."""

    def indexer_modules(self, model: Any) -> list[Any]:
        """See `TransformersAdapter.indexer_modules`."""
        return [None] * len(model.model.layers)


READ.update(read_sources.READ)
_CHECKPOINT = DenseGqaCheckpoint()
DENSE_GQA = Family("dense_gqa", _CHECKPOINT, DenseGqaSglang(_CHECKPOINT), DenseGqaTransformers())
