"""Dense models with grouped-query attention: Llama, Qwen2, Qwen3 (also its MoE) and Mistral (DELTA, arXiv 2510.09883).

These models have no indexers, so a pattern says what is selected: pages of the cache. While decoding, a `D` layer
attends to everything, and one that an `S` follows also scores the pages; `S` layers attend to the best of them. SGLang
reads prompts as before. Read: sglang/srt/layers/radix_attention.py and layers/attention of 0.5.17 and 0.5.23, and the
four models in transformers 5.17 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from indexcache_dense.family import read_sources
from indexcache_dense.family.checkpoint import DenseGqaCheckpoint
from indexcache_dense.family.sglang import DenseGqaSglang
from sglang_indexcache.families.base import Family, TransformersAdapter
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.sglang.read_sources import READ

if TYPE_CHECKING:
    from torch import Tensor


class DenseGqaTransformers(TransformersAdapter):
    """An adapter that finds no indexer in any layer, and makes layers attend to pages."""

    def indexer_modules(self, model: Any) -> list[Any]:
        """See `TransformersAdapter.indexer_modules`."""
        return [None] * len(model.model.layers)

    def selecting(
        self,
        model: Any,
        pattern: Pattern,
        observe: Callable[[int, Tensor], None] | None,
        carried: Tensor | None,
        prompt: Tensor | None,
    ) -> AbstractContextManager[None]:
        """See `TransformersAdapter.selecting`; `observe` gets pages, see `apply_page_roles`."""
        from indexcache_dense.hf.pages import apply_page_roles

        return apply_page_roles(model, pattern, prompt, observe=observe, carried=carried)

    def kernels(self, model: Any) -> AbstractContextManager[None]:
        """See `TransformersAdapter.kernels`; the model attends in blocks of queries."""
        from indexcache_dense.hf.pages import attention_in_blocks

        return attention_in_blocks()


READ.update(read_sources.READ)
_CHECKPOINT = DenseGqaCheckpoint()
DENSE_GQA = Family("dense_gqa", _CHECKPOINT, DenseGqaSglang(_CHECKPOINT), DenseGqaTransformers())
