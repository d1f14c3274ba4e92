"""DeepSeek Sparse Attention with one lightning indexer a layer: DeepSeek-V3.2, GLM-5, 5.1, 5.2 and 5.3."""

from __future__ import annotations

from typing import ClassVar

from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa import needs
from sglang_indexcache.families.dsa.blocks.adapter import BlocksAdapter
from sglang_indexcache.families.dsa.checkpoint import DsaCheckpoint
from sglang_indexcache.families.dsa.transformers import DsaTransformers
from sglang_indexcache.sglang.probes import Feature


class _DsaServing(BlocksAdapter):
    """An adapter of these models."""

    serving = Feature("dsa", "patterns of F and S on DeepSeek-V3.2 and GLM-5", needs.ATTENTIONS, "no server for these")
    pipeline: ClassVar[Feature | None] = Feature(
        "pipeline", "pipeline stages that begin with an S layer", (needs.STAGES,), "no server with pipeline parallelism"
    )


_CHECKPOINT = DsaCheckpoint()
DSA = Family("dsa", _CHECKPOINT, _DsaServing(_CHECKPOINT), DsaTransformers())
