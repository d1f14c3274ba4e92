"""DeepSeek-V4: compressed sparse attention, whose layers select among entries of four tokens each.

Only some layers have an indexer: those with compression ratio 4 ("C4" in SGLang, "CSA" in transformers), every second
one. A pattern has one letter for each of them, as in vLLM's docs. All of them write their selection into one buffer of
the forward pass, so a layer that does not run its indexer attends to the last selection: nothing is carried, and no
configuration is read. Read: sglang/srt/models/deepseek_v4.py and layers/attention/dsv4 of 0.5.17 and 0.5.23;
transformers/models/deepseek_v4 of 5.17 and 5.23.
"""

from __future__ import annotations

from typing import Any

from sglang_indexcache.families.base import Family, TransformersAdapter
from sglang_indexcache.families.deepseek_v4.checkpoint import DeepseekV4Checkpoint
from sglang_indexcache.families.deepseek_v4.sglang import DeepseekV4Sglang


class DeepseekV4Transformers(TransformersAdapter):
    """An adapter that finds the indexers inside the compressors."""

    on_kernels = False

    def indexer_modules(self, model: Any) -> list[Any]:
        """See `TransformersAdapter.indexer_modules`."""
        attentions = (layer.self_attn for layer in model.model.layers)
        indexers = (getattr(attention.compressor, "indexer", None) for attention in attentions)
        return [selector for selector in indexers if selector is not None]


_CHECKPOINT = DeepseekV4Checkpoint()
DEEPSEEK_V4 = Family("deepseek_v4", _CHECKPOINT, DeepseekV4Sglang(_CHECKPOINT), DeepseekV4Transformers())
