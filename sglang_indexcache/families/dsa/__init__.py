"""DeepSeek Sparse Attention with one lightning indexer a layer: DeepSeek-V3.2, GLM-5, 5.1, 5.2 and 5.3."""

from __future__ import annotations

from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa.checkpoint import DsaCheckpoint
from sglang_indexcache.families.dsa.sglang import DsaSglang
from sglang_indexcache.families.dsa.transformers import DsaTransformers

_CHECKPOINT = DsaCheckpoint()
DSA = Family("dsa", _CHECKPOINT, DsaSglang(_CHECKPOINT), DsaTransformers())
